"""What a user sees: progress while a run goes, tables when it is done. No torch."""
