"""What a call asks for: arrays and options checked, and the Problem made of them."""
