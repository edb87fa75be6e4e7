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

// Oldest is the first version of NCCL that this package works with, as Version counts:
// communicators that are configured one by one, with names.
const Oldest = 22700

var library struct {
	once    sync.Once
	version int
	err     error
}

// Version loads NCCL and is its version, 22809 for 2.28.9.
func Version() (int, error) {
	l := &library
	l.once.Do(func() {
		if why := C.cprun_nccl_load(); why != nil {
			l.err = fmt.Errorf("NCCL: %s; install NCCL 2 where the loader finds libnccl.so.2 (ldconfig, or "+
				"LD_LIBRARY_PATH)", C.GoString(why))
			return
		}
		var v C.int
		if l.err = check("ncclGetVersion", C.cprun_nccl_version(&v)); l.err != nil {
			return
		}
		if l.version = int(v); l.version < Oldest {
			l.err = fmt.Errorf("NCCL %s is too old; install %s or newer", VersionText(l.version), VersionText(Oldest))
		}
	})
	return l.version, l.err
}

// VersionText returns 2.28.9 for 22809.
func VersionText(v int) string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// Error is a failed call.
type Error struct {
	Call   string
	Code   int
	Text   string
	Detail string // what NCCL said last, of any communicator; may be empty
}

func (e *Error) Error() string {
	if e.Detail == "" {
		return fmt.Sprintf("%s: %s", e.Call, e.Text)
	}
	return fmt.Sprintf("%s: %s (%s)", e.Call, e.Text, e.Detail)
}

// ErrGone is returned by calls on a communicator that has been aborted or destroyed.
var ErrGone = errors.New("NCCL communicator ended")

// check is nil, also for a call that goes on in the background, or an *Error.
func check(call string, r C.ncclResult_t) error {
	if r == C.ncclSuccess || r == C.ncclInProgress {
		return nil
	}
	return &Error{
		Call: call, Code: int(r), Text: C.GoString(C.cprun_nccl_text(r)),
		Detail: strings.TrimSpace(C.GoString(C.cprun_nccl_detail())),
	}
}

// IDBytes is the length of an ID.
const IDBytes = C.NCCL_UNIQUE_ID_BYTES

// ID is what the ranks of a communicator find each other by.
type ID [IDBytes]byte

// NewID makes an ID, on one rank, which gives it to the others.
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

// Config of a communicator. All ranks give the same; 0 and "" leave a choice to NCCL.
type Config struct {
	MinCTAs, MaxCTAs int // blocks of a kernel; one takes a processor of the device
	// Cluster is how many blocks are scheduled together; negative means none.
	Cluster int
	Name    string // in NCCL's log and in profiles
}

// Comm is a communicator of one device's rank. Calls begin what NCCL goes on with in the
// background: before the next call, Busy must have said that it is over. A call that queues
// work on a stream has done so by then and not before. One goroutine makes calls; any may
// call Busy, Abort and Destroy.
type Comm struct {
	dev  *cuda.Device
	name *C.char
	cell *C.ncclComm_t // where NCCL puts the communicator; it may write there later

	mu   sync.Mutex
	comm C.ncclComm_t // guarded by mu; nil when ended
}

// Init begins to join the ranks that have the same id.
func Init(dev *cuda.Device, id ID, rank, size int, cfg Config) (*Comm, error) {
	if _, err := Version(); err != nil {
		return nil, err
	}
	c := &Comm{dev: dev, cell: (*C.ncclComm_t)(C.calloc(1, C.sizeof_ncclComm_t))}
	if cfg.Name != "" {
		c.name = C.CString(cfg.Name)
	}
	cluster := C.int(cfg.Cluster)
	switch {
	case cfg.Cluster == 0:
		cluster = -1
	case cfg.Cluster < 0:
		cluster = 0
	}
	err := dev.With(func() error {
		return check("ncclCommInitRankConfig", C.cprun_nccl_init(c.cell, C.int(size), unsafe.Pointer(&id), C.int(rank),
			C.int(max(cfg.MinCTAs, min(cfg.MaxCTAs, 1))), C.int(cfg.MaxCTAs), cluster, c.name))
	})
	c.comm = *c.cell
	if err != nil {
		c.Abort()
		return nil, err
	}
	return c, nil
}

// free lets go of what NCCL may have looked at until now.
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

// Busy reports whether a call is still going on in the background, and what has gone wrong on
// the communicator so far.
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

// Abort ends what is under way, on the host and on the device, and gives everything back. It
// returns when that is done, which may take seconds; the device is freed at once.
func (c *Comm) Abort() {
	if comm := c.take(); comm != nil {
		// What it could say is that something had gone wrong before.
		_ = c.dev.With(func() error { return check("ncclCommAbort", C.cprun_nccl_abort(comm)) })
		c.free()
	}
}

// Destroy gives everything back. No call is going on, and no work is on the device.
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

// AllReduce queues combining count elements over the ranks, in place.
func (c *Comm) AllReduce(s *cuda.Stream, buf uint64, count int, d tensor.DType, op Op) error {
	return c.call("ncclAllReduce", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_all_reduce(comm, s.Handle(), C.uint64_t(buf), C.size_t(count), types[d], C.int(op))
	})
}

// AllGather queues gathering bytes of each rank; src may be the own part of dst.
func (c *Comm) AllGather(s *cuda.Stream, dst, src uint64, bytes int64) error {
	return c.call("ncclAllGather", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_all_gather(comm, s.Handle(), C.uint64_t(dst), C.uint64_t(src), C.size_t(bytes))
	})
}

// ReduceScatter queues combining the ranks' src, count elements for each rank; dst may be the
// own part of src.
func (c *Comm) ReduceScatter(s *cuda.Stream, dst, src uint64, count int, d tensor.DType, op Op) error {
	return c.call("ncclReduceScatter", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_reduce_scatter(comm, s.Handle(), C.uint64_t(dst), C.uint64_t(src), C.size_t(count),
			types[d], C.int(op))
	})
}

// Broadcast queues copying root's bytes to every rank.
func (c *Comm) Broadcast(s *cuda.Stream, buf uint64, bytes int64, root int) error {
	return c.call("ncclBroadcast", func(comm C.ncclComm_t) C.ncclResult_t {
		return C.cprun_nccl_broadcast(comm, s.Handle(), C.uint64_t(buf), C.size_t(bytes), C.int(root))
	})
}
