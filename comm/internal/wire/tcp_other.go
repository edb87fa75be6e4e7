//go:build !linux || portable

package wire

import (
	"syscall"
	"time"
)

// Outside Linux a job has one node, and its ranks meet over Unix sockets. A Mesh of a library user may still
// use TCP: the deadline then replaces the detection of silence, and a rank that exits may lose its last words.

func keepSending(syscall.RawConn, time.Duration) {}

func sendOften(syscall.RawConn) {}

func segments(syscall.RawConn) (n uint32, ok bool) { return 0, false }

func onTheWay(syscall.RawConn) bool { return false }
