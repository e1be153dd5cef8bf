"""What the service tells about itself: metrics and logs."""
