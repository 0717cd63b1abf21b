"""A step's inputs from the rows that the device keeps, and its tokens back into them."""
