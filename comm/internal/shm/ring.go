// Package shm shares memory between two processes of one node: an Area with a Ring of bytes for each direction. Another
// channel announces new bytes and free room; no call here waits.
//
// The memory is a memfd. It has no name, so a process needs its descriptor to open it, and the kernel frees it with the
// last process that has it. Its size is sealed: the other process cannot truncate it under this one. Systems other than
// Linux have no memfd. New fails there, and the two processes send everything through their socket.
package shm

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ring carries bytes one way, from a goroutine of one process to a goroutine of the other. The writer counts the
// written bytes and the reader the read ones. Neither trusts the other: the memory contains only the amount of room
// that is free again.
type Ring struct {
	taken *atomic.Uint64 // in the memory: how many bytes have been read
	waits *atomic.Uint32 // in the memory: 1 if the writer waits for room
	data  []byte

	reserved uint64 // writer's: bytes with reserved room
	at       uint64 // of this side: how many bytes have been written, or read
}

// Room reports whether n bytes have room. If not, the reader's next Take will say that the writer waits.
func (r *Ring) Room(n int) bool {
	if r.free() >= n {
		return true
	}
	r.waits.Store(1)
	return r.free() >= n // the reader may have looked ahead of the line above
}

// free returns how many bytes have room; none if the other side's count is impossible.
func (r *Ring) free() int {
	used := r.reserved - r.taken.Load()
	if used > ringBytes {
		return 0
	}
	return int(ringBytes - used)
}

// Reserve takes room for n bytes, for a later Put, or returns false as Room does.
func (r *Ring) Reserve(n int) bool {
	if !r.Room(n) {
		return false
	}
	r.reserved += uint64(n)
	return true
}

// Put writes bytes with reserved room. The reader may take them once it is informed.
func (r *Ring) Put(b []byte) {
	n := copy(r.data[r.at%ringBytes:], b)
	copy(r.data, b[n:])
	r.at += uint64(len(b))
}

// Take fills b with the next bytes, which have been written, and reports whether the writer waits for room.
func (r *Ring) Take(b []byte) (wake bool) {
	n := copy(b, r.data[r.at%ringBytes:])
	copy(b[n:], r.data)
	r.at += uint64(len(b))
	r.taken.Store(r.at)
	return r.waits.Load() != 0 && r.waits.Swap(0) != 0
}

const (
	// ringBytes gives the capacity of a ring. 512 KiB measured the same, 1 MiB a fifth slower: such rings no longer
	// stay in the cache beside the message.
	ringBytes = 256 << 10

	// Each counter has its own cache line. The first page has the counters of both rings.
	lineBytes   = 64
	headerBytes = 4096
	areaBytes   = headerBytes + 2*ringBytes
)

// Area is one process' side of the memory. The system allocates its pages at their first write.
type Area struct {
	Out *Ring // to the other process
	In  *Ring // from it

	mem   []byte
	users atomic.Int32 // users that may still touch mem
}

// Try returns an error if two processes of this node cannot share memory.
func Try() error {
	a, f, err := New()
	if err != nil {
		return err
	}
	defer f.Close()
	defer a.Close()
	b, err := Open(f)
	if err == nil {
		b.Close()
	}
	return err
}

// mapped returns one side's view: side 0 made the memory, side 1 opens it.
func mapped(f *os.File, side int) (*Area, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, areaBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", areaBytes, err)
	}
	a := &Area{mem: mem, Out: ringAt(mem, side), In: ringAt(mem, 1-side)}
	a.users.Store(1)
	return a, nil
}

func ringAt(mem []byte, side int) *Ring {
	counter := func(n int) unsafe.Pointer { return unsafe.Pointer(&mem[(2*side+n)*lineBytes]) }
	return &Ring{
		taken: (*atomic.Uint64)(counter(0)), waits: (*atomic.Uint32)(counter(1)),
		data: mem[headerBytes+side*ringBytes:][:ringBytes:ringBytes],
	}
}

// Share counts one more user, which must also call Close.
func (a *Area) Share() { a.users.Add(1) }

// Close ends one user's access. The last user's Close unmaps the memory. A nil Area is allowed.
func (a *Area) Close() {
	if a == nil || a.users.Add(-1) > 0 {
		return
	}
	_ = unix.Munmap(a.mem) // cannot fail: mem is the whole mapping
}
