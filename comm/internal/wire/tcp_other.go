//go:build !linux || portable

package wire

import (
	"syscall"
	"time"
)

// Outside Linux a job has one node, and its ranks connect over Unix sockets. A library user's Mesh may still use TCP:
// the deadline then replaces the detection of silence, and an exiting rank may lose its last frames.

func keepSending(syscall.RawConn, time.Duration) {}

func sendOften(syscall.RawConn) {}

func segments(syscall.RawConn) (n uint32, ok bool) { return 0, false }

func onTheWay(syscall.RawConn) bool { return false }
