package wald

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"wald.dev/client/go/waldv1"
)

// ErrState is in the chain of errors of a [DurableProducer] or [DurableFollower] whose state
// cannot be loaded or saved, or is not its state.
var ErrState = errors.New("state")

// State is the place of the state of one producer or one follower: a file ([FileState]), or a
// row in the program's own database. Calls come one after another. The bytes are a message of
// the contract (waldv1.ProducerState, waldv1.FollowerState), as in clients of other languages.
//
// One producer or follower may use a state at a time. A state with a lock takes it in Load, and
// has the method Close of [io.Closer], which releases it. Close is called once after each Load
// that returned no error, when the producer or follower is closed or could not be opened. Its
// error is ignored: all that counts has been saved by then.
type State interface {
	// Load returns the state that was saved last; nil if none was. An empty slice is a state
	// that was cut off, which is refused.
	Load() ([]byte, error)
	// Save replaces the state: all of it or nothing. Once it has returned nil, the state
	// survives a crash of the machine. It must not keep the slice.
	Save(state []byte) error
}

// FileState is state in the file with this path, which only its owner can read. The file's
// directory must exist.
//
// Each save writes a new file, path + ".new", flushes it, and renames it. A producer or follower
// that uses the state holds a lock on a third file, path + ".lock", until it is closed or its
// process ends. Another one is refused ([ErrState]), in this process and in others. The file
// stays. If the path is a symbolic link, all of this concerns the file that the link names, and the
// link stays. Windows, AIX and Solaris have no such lock: let one process use the file at a time.
func FileState(path string) State { return &fileState{path: path} }

type fileState struct {
	path  string
	mutex sync.Mutex
	// Releases the lock; nil while it is not held.
	unlock func() error
}

var errInUse = errors.New("another process or producer uses it")

func (f *fileState) Load() ([]byte, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.unlock != nil {
		return nil, fmt.Errorf("%s: %w", f.path, errInUse)
	}
	// Otherwise a save would replace the link, and users of different names would have different locks.
	f.path = behindLinks(f.path)
	unlock, err := lockFile(f.path + ".lock")
	if errors.Is(err, errInUse) {
		return nil, fmt.Errorf("%s: %w", f.path, errInUse)
	} else if err != nil {
		return nil, err
	}
	state, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		state, err = nil, nil
	}
	if err != nil {
		return nil, errors.Join(err, unlock())
	}
	f.unlock = unlock
	return state, nil
}

// behindLinks returns the path that a symbolic link names, which need not exist; path itself, if it
// is no link. The names beside it are the same through all links to its directory.
func behindLinks(path string) string {
	// The kernel refuses a path with more.
	for range 40 {
		target, err := os.Readlink(path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			// Not filepath.Join, which removes ".." after links to directories.
			directory, _ := filepath.Split(path)
			target = directory + target
		}
		path = target
	}
	return path
}

// Close releases the lock.
func (f *fileState) Close() error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.unlock == nil {
		return nil
	}
	unlock := f.unlock
	f.unlock = nil
	return unlock()
}

func (f *fileState) Save(state []byte) error {
	path := f.path
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

// heldState is a state that was loaded.
type heldState struct {
	State
	found bool
	// Lets others have it. Later calls do nothing, since another one may have it by then.
	release func()
}

// loadState decodes the state of an owner, "a producer" or "a follower", into the message.
func loadState(state State, message stateMessage, kind waldv1.StateKind, owner string) (heldState, *Error) {
	saved, err := state.Load()
	if err != nil {
		return heldState{}, stateRefused(err)
	}
	held := heldState{State: state, found: saved != nil, release: sync.OnceFunc(func() {
		if closer, ok := state.(io.Closer); ok {
			_ = closer.Close()
		}
	})}
	if !held.found {
		return held, nil
	}
	err = proto.Unmarshal(saved, message)
	if err == nil && message.GetKind() != kind {
		err = fmt.Errorf("its kind is %v", message.GetKind())
	}
	if err != nil {
		held.release()
		return heldState{}, stateRefused(fmt.Errorf("it is not the state of %s: %w", owner, err))
	}
	return held, nil
}

type stateMessage interface {
	proto.Message
	GetKind() waldv1.StateKind
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

// stateRefused is the error of a state that cannot be used. Nothing was sent.
func stateRefused(err error) *Error {
	e := stateFailure(err)
	e.Outcome = NotApplied
	return e
}

// stateFailure is the error of a state that could not be saved. The outcome is unknown, because the next start of the
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
