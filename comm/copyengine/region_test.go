package copyengine

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
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

// TestCopyBeyondRegion has a peer post a receive beyond its allocation: the sender names it and copies
// nothing.
func TestCopyBeyondRegion(t *testing.T) {
	ctx := testContext(t)
	hosts, board := comm.NewLocal(2, nil, comm.Options{}), newHeapBoard(2)
	streams := []*tensor.HostStream{tensor.NewHostStream("compute 0"), tensor.NewHostStream("compute 1")}
	worlds, errs := connectAll(func(r int) config {
		c := config{
			host:    hosts[r],
			dev:     &fakeDevice{rank: r},
			compute: streams[r],
			using:   new(sync.Mutex),
			limit:   hosts[r].Options().Deadline,
			share:   board,
		}
		if r == 1 {
			c.dev = lying{&fakeDevice{rank: r}}
		}
		return c
	}, 2)
	var wg sync.WaitGroup
	for r, w := range worlds {
		if errs[r] != nil {
			t.Fatal(errs[r])
		}
		wg.Go(func() {
			v := []comm.Message{{Peer: 1 - r, View: tensor.New(tensor.U8, 1000)}}
			send, recv := v, []comm.Message(nil)
			if r == 1 {
				send, recv = nil, v
			}
			p, err := w.Exchange(send, recv)
			if err == nil {
				err = p.Sync(ctx)
			}
			if err == nil ||
				r == 0 &&
					!strings.Contains(
						err.Error(),
						"memory of rank 1: 1000 bytes at offset 1048576 are not within its allocation of 1000",
					) {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
	for r, w := range worlds {
		w.Close()
		streams[r].Close()
	}
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
	for _, path := range []string{short, fifo} {
		f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := mapBoard(f, 2); err == nil || !strings.Contains(err.Error(), "is no shared memory of") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := os.Truncate(short, int64(boardWords(2))*8); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(short, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := mapBoard(f, 2)
	if err == nil {
		err = sharedFile{}.done(b)
	}
	if err != nil {
		t.Errorf("a file of the right size: %v", err)
	}
}
