"""What runs many trainings: sweep, advise, double, search-ops."""
