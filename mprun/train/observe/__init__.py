"""mprun's eyes in training loops that mprun does not own."""
