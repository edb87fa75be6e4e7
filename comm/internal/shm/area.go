// Package shm is memory that two processes of one node share: a ring of bytes for each direction. What
// lies in a ring, and that there is room again, is for another channel to tell; nobody waits here.
//
// The memory is a memfd. It has no name, so nobody finds it who was not given its descriptor, and it is gone
// with the last process that has it, however that ends. Its size is sealed: the other process cannot cut it
// off under this one.
package shm

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// RingBytes is what a ring holds. 512 KiB measured the same, 1 MiB a fifth slower: such rings no longer stay
	// in the cache beside what is sent.
	RingBytes = 256 << 10

	// Each counter is alone in its cache line. Those of both rings are in the first page.
	lineBytes   = 64
	headerBytes = 4096
	areaBytes   = headerBytes + 2*RingBytes

	// fixed says that a memory keeps its size and these seals.
	fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

// Area is one process' side of the memory. The system gives it pages as they are first written.
type Area struct {
	Out *Ring // to the other process
	In  *Ring // from it

	mem   []byte
	users atomic.Int32 // who may still touch mem
}

// New makes the memory, and the descriptor by which the other process opens it. The caller closes that. It
// fails where the system has no memfd, or allows this process none.
func New() (*Area, *os.File, error) {
	fd, err := unix.MemfdCreate("cprun-exchange", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memfd of exchanges")
	a, err := prepare(f)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return a, f, nil
}

// prepare sets the size of a new memory for good.
func prepare(f *os.File) (*Area, error) {
	if err := unix.Ftruncate(int(f.Fd()), areaBytes); err != nil {
		return nil, fmt.Errorf("memfd of %d bytes: %w", areaBytes, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, fixed); err != nil {
		return nil, fmt.Errorf("seals of a memfd: %w", err)
	}
	return mapped(f, 0)
}

// Open returns the other side of a memory that New has made. The caller closes f. It refuses a file whose
// size could change: to touch what is cut off would end this process.
func Open(f *os.File) (*Area, error) {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("seals of the memory: %w", err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case seals&fixed != fixed:
		return nil, fmt.Errorf("memory with seals %#x: its size can change, it needs %#x", seals, fixed)
	case info.Size() != areaBytes:
		return nil, fmt.Errorf("memory of %d bytes, it is to have %d", info.Size(), areaBytes)
	}
	return mapped(f, 1)
}

// Try returns why two processes of this node cannot share memory, or nil.
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

// mapped returns one side's view: 0 of who has made the memory, or 1.
func mapped(f *os.File, side int) (*Area, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, areaBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", areaBytes, err)
	}
	a := &Area{mem: mem, Out: ringAt(mem, side), In: ringAt(mem, 1-side)}
	a.users.Store(1)
	return a, nil
}

// ringAt returns the ring that a side writes.
func ringAt(mem []byte, side int) *Ring {
	counter := func(n int) unsafe.Pointer { return unsafe.Pointer(&mem[(2*side+n)*lineBytes]) }
	return &Ring{
		taken: (*atomic.Uint64)(counter(0)), waits: (*atomic.Uint32)(counter(1)),
		data: mem[headerBytes+side*RingBytes:][:RingBytes:RingBytes],
	}
}

// Share notes one more user, who calls Close, too.
func (a *Area) Share() { a.users.Add(1) }

// Close says that a user touches the memory no more. The last one gives it back. It may be called on nil.
func (a *Area) Close() {
	if a == nil || a.users.Add(-1) > 0 {
		return
	}
	_ = unix.Munmap(a.mem) // it is ours, whole and mapped: nothing can be amiss
}
