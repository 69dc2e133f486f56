"""What will a GPU run? A program compiled for a GPU that need not be there, read from the text of its module."""
