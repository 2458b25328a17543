"""The flags of the program, declared once; `table` has all of them."""
