package copyengine

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cprun/cprun/comm"
)

func TestRegion(t *testing.T) {
	r := region{base: 1 << 20, bytes: 100}
	for _, c := range []struct {
		offset, bytes uint64
		ok            bool
	}{
		{0, 100, true}, {40, 60, true}, {100, 0, true}, {0, 101, false}, {41, 60, false}, {101, 0, false},
		{math.MaxUint64, 2, false}, {2, math.MaxUint64, false},
	} {
		if at, err := r.at(c.offset, c.bytes); (err == nil) != c.ok || err == nil && at != r.base+c.offset {
			t.Errorf("%d bytes at %d: %#x, %v", c.bytes, c.offset, at, err)
		}
	}
}

// A lying device reports addresses beyond its memory.
type lying struct{ *fakeDevice }

// export returns a location beyond the allocation.
func (d lying) export(addr uint64) (location, error) {
	return d.fakeDevice.export(addr + 1<<20)
}

// TestCopyBeyondRegion posts a receive beyond its allocation: the sender's error names the peer, and nothing is copied.
func TestCopyBeyondRegion(t *testing.T) {
	const want = "memory of rank 1: 1000 bytes at offset 1048576 are not within its allocation of 1000"
	ctx, ranks := testContext(t), localRanks(t, 2, 0)
	ranks[1].e.dev = lying{&fakeDevice{rank: 1}}
	eachRank(t, ranks, func(r *Rank) error {
		v, err := r.rig.bytes(1000)
		if err != nil {
			return err
		}
		err = comm.Finish(ctx)(r.one(r.Rank() == 0, with(1-r.Rank(), v)))
		if err == nil || r.Rank() == 0 && !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: %v", r.Rank(), err)
		}
		return nil
	})
}

// TestMapBoardRefused checks that no file is mapped that has not room for the board.
func TestMapBoardRefused(t *testing.T) {
	short, fifo := filepath.Join(t.TempDir(), "short"), filepath.Join(t.TempDir(), "fifo")
	if err := os.WriteFile(short, make([]byte, boardWords(2)*8-1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	refused := func(path string) error {
		f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b, err := mapBoard(f, 2)
		if err == nil {
			err = sharedFile{}.done(b)
		}
		return err
	}
	for _, path := range []string{short, fifo} {
		if err := refused(path); err == nil || !strings.Contains(err.Error(), "is no shared memory of") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := os.Truncate(short, int64(boardWords(2))*8); err != nil {
		t.Fatal(err)
	}
	if err := refused(short); err != nil {
		t.Errorf("a file of the right size: %v", err)
	}
}
