//go:build cuda

package nccl

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include "nccl_shim.h"
#cgo noescape cprun_nccl_exchange
#cgo nocallback cprun_nccl_exchange
#cgo noescape cprun_nccl_state
#cgo nocallback cprun_nccl_state
*/
import "C"

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/tensor"
)

// Oldest is the oldest supported version of NCCL, as a number of Version. It has a configuration and a name for each
// communicator.
const Oldest = 22700

// Version loads NCCL and returns its version, 22809 for 2.28.9.
func Version() (int, error) { return load() }

var load = sync.OnceValues(func() (version int, err error) {
	if why := C.cprun_nccl_load(); why != nil {
		return 0, fmt.Errorf("NCCL: %s; install NCCL 2 where the loader finds libnccl.so.2 (ldconfig, or "+
			"LD_LIBRARY_PATH)", C.GoString(why))
	}
	var v C.int
	if err := check("ncclGetVersion", C.cprun_nccl_version(&v)); err != nil {
		return 0, err
	}
	if v < Oldest {
		err = fmt.Errorf("NCCL %s is too old; install %s or newer", VersionText(int(v)), VersionText(Oldest))
	}
	return int(v), err
})

// VersionText formats a version: 2.28.9 for 22809.
func VersionText(v int) string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// Error is a failed call.
type Error struct {
	Call   string
	Text   string
	Detail string // NCCL's last message, of any communicator; may be empty
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return fmt.Sprintf("%s: %s", e.Call, e.Text)
	}
	return fmt.Sprintf("%s: %s (%s)", e.Call, e.Text, e.Detail)
}

// ErrGone is the error of calls on an aborted or destroyed communicator.
var ErrGone = errors.New("NCCL communicator ended")

// check returns an *Error, or nil for a call that succeeded or continues in the background.
func check(call string, r C.ncclResult_t) error {
	if r == C.ncclSuccess || r == C.ncclInProgress {
		return nil
	}
	return &Error{
		Call: call, Text: C.GoString(C.cprun_nccl_text(r)),
		Detail: strings.TrimSpace(C.GoString(C.cprun_nccl_detail())),
	}
}

// IDBytes is the length of an ID.
const IDBytes = C.NCCL_UNIQUE_ID_BYTES

// ID identifies a communicator. All its ranks need the same ID.
type ID [IDBytes]byte

// NewID makes an ID. One rank calls it and sends the ID to the others.
func NewID() (ID, error) {
	if _, err := Version(); err != nil {
		return ID{}, err
	}
	var id C.ncclUniqueId
	if err := check("ncclGetUniqueId", C.cprun_nccl_id(&id)); err != nil {
		return ID{}, err
	}
	return *(*ID)(unsafe.Pointer(&id)), nil
}

// Config configures a communicator. All ranks must pass the same. 0 and "" leave the choice to NCCL.
type Config struct {
	MaxCTAs int    // blocks of a kernel; each takes an SM
	Name    string // in NCCL's log and in profiles
}

// Comm is the communicator of one rank. A call may continue in the background: before the next call, Busy must return
// false. Only then has a call queued its work on the stream. One goroutine makes calls; any may call Busy, Abort and
// Destroy.
type Comm struct {
	dev  *cuda.Device
	name *C.char
	cell *C.ncclComm_t // NCCL writes the communicator here, possibly later

	mu   sync.Mutex
	comm C.ncclComm_t // guarded by mu; nil when ended
}

// Init begins to connect the ranks with the same id.
func Init(dev *cuda.Device, id ID, rank, size int, cfg Config) (*Comm, error) {
	if _, err := Version(); err != nil {
		return nil, err
	}
	c := &Comm{dev: dev, cell: (*C.ncclComm_t)(C.calloc(1, C.sizeof_ncclComm_t))}
	if cfg.Name != "" {
		c.name = C.CString(cfg.Name)
	}
	err := dev.With(func() error {
		return check("ncclCommInitRankConfig", C.cprun_nccl_init(c.cell, C.int(size), unsafe.Pointer(&id), C.int(rank),
			C.int(cfg.MaxCTAs), c.name))
	})
	c.comm = *c.cell
	if err != nil {
		c.Abort()
		return nil, err
	}
	return c, nil
}

// free frees memory that NCCL may have used until now.
func (c *Comm) free() {
	C.free(unsafe.Pointer(c.name))
	C.free(unsafe.Pointer(c.cell))
}

func (c *Comm) call(name string, f func(comm C.ncclComm_t) C.ncclResult_t) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.comm == nil {
		return ErrGone
	}
	return c.dev.With(func() error { return check(name, f(c.comm)) })
}

// Busy reports whether a call is still running in the background, and returns the communicator's error so far.
func (c *Comm) Busy() (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.comm == nil {
		return false, ErrGone
	}
	var state C.ncclResult_t
	if err := check("ncclCommGetAsyncError", C.cprun_nccl_state(c.comm, &state)); err != nil {
		return false, err
	}
	return state == C.ncclInProgress, check("NCCL in the background", state)
}

func (c *Comm) take() C.ncclComm_t {
	c.mu.Lock()
	defer c.mu.Unlock()
	comm := c.comm
	c.comm = nil
	return comm
}

// Abort ends all current work, on the host and on the device, and frees the communicator. It may take seconds; the
// device is free at once.
func (c *Comm) Abort() {
	if comm := c.take(); comm != nil {
		// An error could only repeat an earlier failure.
		_ = c.dev.With(func() error { return check("ncclCommAbort", C.cprun_nccl_abort(comm)) })
		c.free()
	}
}

// Destroy frees the communicator. No call may be running, and no work may be on the device.
func (c *Comm) Destroy() error {
	comm := c.take()
	if comm == nil {
		return nil
	}
	defer c.free()
	return c.dev.With(func() error { return check("ncclCommDestroy", C.cprun_nccl_destroy(comm)) })
}

// Message is one end of a message of bytes at a device address.
type Message struct {
	Addr  uint64
	Bytes int64
	Peer  int  // rank of the communicator
	Send  bool // to Peer; else from it
}

// Exchange queues messages as one group.
func (c *Comm) Exchange(s *cuda.Stream, ms []Message) error {
	if len(ms) == 0 {
		return nil
	}
	all := make([]C.cprun_nccl_message, len(ms))
	for i, m := range ms {
		all[i] = C.cprun_nccl_message{addr: C.uint64_t(m.Addr), bytes: C.size_t(m.Bytes), peer: C.int(m.Peer)}
		if m.Send {
			all[i].send = 1
		}
	}
	return c.call("ncclSend, ncclRecv", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_exchange(comm, s.Handle(), &all[0], C.int(len(all)))
	})
}

// Op is a reduction.
type Op int

// The reductions.
const (
	Sum Op = C.ncclSum
	Max Op = C.ncclMax
	Min Op = C.ncclMin
)

var types = map[tensor.DType]C.int{
	tensor.F64: C.ncclFloat64, tensor.F32: C.ncclFloat32, tensor.F16: C.ncclFloat16, tensor.BF16: C.ncclBfloat16,
	tensor.I64: C.ncclInt64, tensor.I32: C.ncclInt32, tensor.U8: C.ncclUint8,
}

// AllReduce queues the reduction of count elements over the ranks, in place.
func (c *Comm) AllReduce(s *cuda.Stream, buf uint64, count int, d tensor.DType, op Op) error {
	return c.call("ncclAllReduce", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_all_reduce(comm, s.Handle(), C.uint64_t(buf), C.size_t(count), types[d], C.int(op))
	})
}

// AllGather queues gathering bytes of each rank. src may be this rank's part of dst.
func (c *Comm) AllGather(s *cuda.Stream, dst, src uint64, bytes int64) error {
	return c.call("ncclAllGather", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_all_gather(comm, s.Handle(), C.uint64_t(dst), C.uint64_t(src), C.size_t(bytes))
	})
}

// ReduceScatter queues the reduction of the ranks' src, count elements for each rank. dst may be this rank's part of
// src.
func (c *Comm) ReduceScatter(s *cuda.Stream, dst, src uint64, count int, d tensor.DType, op Op) error {
	return c.call("ncclReduceScatter", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_reduce_scatter(comm, s.Handle(), C.uint64_t(dst), C.uint64_t(src), C.size_t(count),
			types[d], C.int(op))
	})
}

// Broadcast queues a copy of root's bytes to every rank.
func (c *Comm) Broadcast(s *cuda.Stream, buf uint64, bytes int64, root int) error {
	return c.call("ncclBroadcast", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_broadcast(comm, s.Handle(), C.uint64_t(buf), C.size_t(bytes), C.int(root))
	})
}
