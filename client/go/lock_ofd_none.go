//go:build darwin || dragonfly || freebsd || illumos || netbsd || openbsd

package wald

import "os"

// lockForJava does nothing: package syscall has no lock of fcntl that belongs to an open file.
func lockForJava(*os.File) error { return nil }

func unlockForJava(*os.File) {}
