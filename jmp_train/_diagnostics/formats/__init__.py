"""What does a number format do to a program? Exponents, underflow, loss scales, and the error of the gradient."""
