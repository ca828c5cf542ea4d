module wald.dev/ci/history

go 1.26.0

replace wald.dev/client/go => ../../../../client/go

require (
	github.com/anishathalye/porcupine v1.3.1
	google.golang.org/genproto/googleapis/rpc v0.0.0-20261019180522-ce908d29299b
	google.golang.org/grpc v1.85.0
	wald.dev/client/go v0.0.0-00010101000000-000000000000
)

require (
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
