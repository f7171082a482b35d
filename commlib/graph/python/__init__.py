"""What objects of Python a function can reach, what they hold, and how that is put back."""
