"""The direct wire: silos call the server by gRPC over TLS 1.3, each with a certificate of its own."""
