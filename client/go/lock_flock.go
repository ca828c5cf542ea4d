//go:build darwin || dragonfly || freebsd || illumos || linux || netbsd || openbsd

package wald

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// lockFile makes or opens a file and locks it. It does not wait: errInUse if it is locked.
func lockFile(path string) (unlock func() error, err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = flock(file, syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = errInUse
	} else if err != nil {
		err = &fs.PathError{Op: "lock", Path: path, Err: err}
	} else {
		err = lockForJava(file)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() error {
		// A child process that has just been forked has the file open too, so Close is not enough.
		unlockForJava(file)
		return errors.Join(flock(file, syscall.LOCK_UN), file.Close())
	}, nil
}

func flock(file *os.File, how int) error {
	for {
		err := syscall.Flock(int(file.Fd()), how)
		if err != syscall.EINTR {
			return err
		}
	}
}
