"""What experts travel over, host to host or device to device: ``lane`` says what one does, ``lanes`` opens them."""
