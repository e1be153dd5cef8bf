"""Leadership among several services: the service that holds the lease leads."""
