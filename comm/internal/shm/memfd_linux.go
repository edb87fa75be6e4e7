//go:build !portable

package shm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// fixed seals a memfd so that its size, and the seals themselves, cannot change.
const fixed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New makes the memory, and the descriptor for the other process, which the caller closes. It fails if the system has
// no memfd or denies it to this process.
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

func prepare(f *os.File) (*Area, error) {
	if err := unix.Ftruncate(int(f.Fd()), areaBytes); err != nil {
		return nil, fmt.Errorf("memfd of %d bytes: %w", areaBytes, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, fixed); err != nil {
		return nil, fmt.Errorf("seals of a memfd: %w", err)
	}
	return mapped(f, 0)
}

// Open returns the other side of a memory made by New. The caller closes f. It refuses a file that could be truncated:
// an access beyond the new end would kill this process.
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
		return nil, fmt.Errorf("memory of %d bytes, want %d", info.Size(), areaBytes)
	}
	return mapped(f, 1)
}
