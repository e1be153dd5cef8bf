"""gRPC stubs, generated from ``proto/eplb/v1`` at build by ``tools/generate_stubs.py``; never edited."""
