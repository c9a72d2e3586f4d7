"""What this machine does natively, how fast, and what that means for each precision mode."""
