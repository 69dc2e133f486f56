"""Facts about programs that passes ask for; nothing here changes a program."""
