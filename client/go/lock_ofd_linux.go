package wald

import (
	"os"
	"syscall"
)

// The command of fcntl for locks that belong to an open file; package syscall does not name it.
const fOFDSetlk = 37

// lockForJava also takes the kind of lock that sees the locks of Java, which has only locks of
// fcntl: errInUse if a Java program has the file. This kind belongs to the open file, as that of
// flock does: a close of the file elsewhere in the process does not release it. A kernel or file
// system without it is no error, because the lock of flock is held then.
func lockForJava(file *os.File) error {
	switch setlk(file, syscall.F_WRLCK) {
	case syscall.EAGAIN, syscall.EACCES:
		return errInUse
	default:
		return nil
	}
}

// unlockForJava releases the lock of lockForJava.
func unlockForJava(file *os.File) { _ = setlk(file, syscall.F_UNLCK) }

func setlk(file *os.File, kind int16) error {
	for {
		// Length 0: the whole file.
		err := syscall.FcntlFlock(file.Fd(), fOFDSetlk, &syscall.Flock_t{Type: kind})
		if err != syscall.EINTR {
			return err
		}
	}
}
