//go:build daemon

// Package orders has a test with a server of its own.
package orders

import (
	"testing"

	wald "wald.dev/client/go"
	"wald.dev/client/go/waldtest"
)

func TestOrdersAreKept(t *testing.T) {
	server := waldtest.Start(t)
	client, err := wald.Dial(server.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	if _, err := client.Append(t.Context(), "orders", wald.Text("tea")); err != nil {
		t.Fatal(err)
	}

	page, err := client.Read(t.Context(), "orders", wald.Last(1))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(page.Records[0].Data); got != "tea" {
		t.Errorf("the last order is %q", got)
	}
}
