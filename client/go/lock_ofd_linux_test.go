package wald

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A lock as Java takes it, on a file that is opened for it.
func lockOfJava(t *testing.T, path string) (*os.File, error) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return file, syscall.FcntlFlock(file.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_WRLCK})
}

func TestStateIsNotSharedWithJava(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	file, err := lockOfJava(t, path+".lock")
	if err != nil {
		t.Fatal(err)
	}
	state := FileState(path).(*fileState)
	if _, err := state.Load(); !errors.Is(err, errInUse) {
		t.Fatalf("a state that Java uses: %v", err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := state.Load(); err != nil {
		t.Fatal(err)
	}
	// A user that is refused leaves the locks with the first one.
	if _, err := FileState(path).Load(); !errors.Is(err, errInUse) {
		t.Fatalf("a state in use: %v", err)
	}
	if file, err = lockOfJava(t, path+".lock"); !errors.Is(err, syscall.EAGAIN) {
		t.Fatalf("Java takes a state in use: %v", err)
	}
	_ = file.Close()
	if err := state.Close(); err != nil {
		t.Fatal(err)
	}
	if file, err = lockOfJava(t, path+".lock"); err != nil {
		t.Fatalf("Java is refused a state that was closed: %v", err)
	}
	_ = file.Close()
}
