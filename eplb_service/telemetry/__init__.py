"""What the service reports about itself: metrics and logs."""
