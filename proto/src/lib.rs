//! The gRPC contract.
