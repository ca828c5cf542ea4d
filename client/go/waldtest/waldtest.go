// Package waldtest starts a Wald server for a test.
//
//	func TestOrders(t *testing.T) {
//		server := waldtest.Start(t)
//		client, err := wald.Dial(server.Endpoint)
//		...
//	}
package waldtest

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// Server is a server with an empty store of its own.
type Server struct {
	// Endpoint is the address of the gRPC service: HOST:PORT.
	Endpoint string
	// HTTP is the address of metrics, probes and the console: HOST:PORT.
	HTTP string
}

// Start starts `wald --ephemeral` with these further arguments, such as "--sync-mode", "async", and waits until it serves.
// The server ends with the test, or with its process. If there is no server, the test fails.
//
// The program is the one of the variable WALD_BINARY, or else the wald of PATH. Its errors go to the standard error of the
// test; the variable WALD_LOG_FILTER shows more.
func Start(t testing.TB, arguments ...string) Server {
	t.Helper()
	binary := os.Getenv("WALD_BINARY")
	if binary == "" {
		binary = "wald"
	}
	command := exec.Command(binary, append([]string{"--ephemeral"}, arguments...)...)
	command.Stderr = os.Stderr
	if os.Getenv("WALD_LOG_FILTER") == "" {
		command.Env = append(os.Environ(), "WALD_LOG_FILTER=error")
	}
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatalf("cannot start %s: %v", binary, err)
	}
	if err := command.Start(); err != nil {
		t.Fatalf("cannot start %s: %v; install wald, or set WALD_BINARY", binary, err)
	}
	t.Cleanup(func() {
		// SIGTERM, so that it removes its directory. It may have ended.
		_ = command.Process.Signal(syscall.SIGTERM)
		_ = command.Wait()
	})
	// Empty if the server ends.
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	var server Server
	for _, word := range strings.Fields(line) {
		switch name, address, _ := strings.Cut(word, "="); name {
		case "grpc":
			server.Endpoint = address
		case "http":
			server.HTTP = address
		}
	}
	if server.Endpoint == "" {
		t.Fatalf("%s --ephemeral does not serve; its own error is above", binary)
	}
	return server
}
