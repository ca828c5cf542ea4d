package wald

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// ErrState is in the chain of errors of a [DurableProducer] or [DurableFollower] whose state
// cannot be loaded or saved, or is not its state.
var ErrState = errors.New("state")

// State is the place of the state of one producer or one follower: a file ([FileState]), or a
// row in the program's own database. Calls come one after another. The bytes are a message of
// the contract (waldv1.ProducerState, waldv1.FollowerState), as in clients of other languages.
type State interface {
	// Load returns the state that was saved last; nil if none was.
	Load() ([]byte, error)
	// Save replaces the state: all of it or nothing. Once it has returned nil, the state
	// survives a crash of the machine. It must not keep the slice.
	Save(state []byte) error
}

// FileState is state in the file with this path, which only its owner can read. The file's
// directory must exist. One process may use the file at a time.
//
// Each save writes a new file, path + ".new", flushes it, and renames it.
func FileState(path string) State { return fileState(path) }

type fileState string

func (f fileState) Load() ([]byte, error) {
	state, err := os.ReadFile(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return state, err
}

func (f fileState) Save(state []byte) error {
	path := string(f)
	file, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(state)
	if err == nil {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	// Without this a crash of the machine may bring the earlier file back.
	return syncDirectory(filepath.Dir(path))
}

func syncDirectory(path string) error {
	// Windows cannot flush a directory.
	if runtime.GOOS == "windows" {
		return nil
	}
	directory, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(directory.Sync(), directory.Close())
}

// loadState decodes the state into the message. False: there is none.
func loadState(state State, message proto.Message) (bool, *Error) {
	saved, err := state.Load()
	if err != nil {
		return false, stateFailure(err)
	}
	if saved == nil {
		return false, nil
	}
	if err := proto.Unmarshal(saved, message); err != nil {
		return false, stateFailure(fmt.Errorf("it is not the state of a producer or follower: %w", err))
	}
	return true, nil
}

func saveState(state State, message proto.Message) *Error {
	encoded, err := proto.Marshal(message)
	if err == nil {
		err = state.Save(encoded)
	}
	if err != nil {
		return stateFailure(err)
	}
	return nil
}

// stateFailure is the error of a state. The outcome is unknown, because the next start of the
// program may find the state that could not be saved.
func stateFailure(err error) *Error {
	cause := fmt.Errorf("%w: %w", ErrState, err)
	return &Error{
		Code:    codes.Internal,
		Message: cause.Error(),
		Outcome: Unknown,
		Retry:   Never,
		cause:   cause,
	}
}
