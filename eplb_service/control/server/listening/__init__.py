"""What a listener needs before it hears anybody: certificates, and answers to health checks."""
