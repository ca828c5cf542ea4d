package wald

import (
	"os"
	"strings"
	"testing"
)

// flatten takes the indentation away, so that a block can be quoted from inside a function.
func flatten(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return "\n" + strings.Join(lines, "\n") + "\n"
}

func TestReadmeQuotesCodeThatIsRun(t *testing.T) {
	var run strings.Builder
	for _, name := range []string{"example_test.go", "examples/tour/main.go"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		run.WriteString(flatten(string(text)))
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(readme), "```go\n")[1:]
	if len(blocks) < 8 {
		t.Errorf("the README has %d blocks of Go", len(blocks))
	}
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "\n```")
		if !strings.Contains(run.String(), flatten(code)) {
			t.Errorf("not in example_test.go, nor in the tour:\n%s", code)
		}
	}
}
