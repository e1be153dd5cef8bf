"""The deployments of a service: `core` decides what is known of them, `server` carries it to and from the world."""
