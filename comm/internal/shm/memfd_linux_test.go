//go:build !portable

package shm

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pair returns both sides of a memory.
func pair(t *testing.T) (maker, opener *Area) {
	t.Helper()
	maker, f, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	opener, err = Open(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(maker.Close)
	t.Cleanup(opener.Close)
	return maker, opener
}

// TestRing sends pieces of random lengths in both directions, many times around the ring. Each piece arrives, a full
// ring takes no more, and the reader wakes a waiting writer.
func TestRing(t *testing.T) {
	maker, opener := pair(t)
	random := rand.New(rand.NewPCG(1, 2))
	for _, way := range []struct{ out, in *Ring }{{maker.Out, opener.In}, {opener.Out, maker.In}} {
		var queued [][]byte
		held, waits, sent := 0, false, 0
		for sent < 8*ringBytes || len(queued) > 0 {
			piece := make([]byte, 1+random.IntN(ringBytes/3))
			fits := held+len(piece) <= ringBytes
			if sent < 8*ringBytes && way.out.Reserve(len(piece)) {
				if !fits {
					t.Fatalf("%d bytes found room beside %d", len(piece), held)
				}
				for i := range piece {
					piece[i] = byte(random.Uint32())
				}
				way.out.Put(piece)
				queued, held, sent = append(queued, piece), held+len(piece), sent+len(piece)
				continue
			} else if sent < 8*ringBytes {
				if waits = true; fits {
					t.Fatalf("%d bytes found no room beside %d", len(piece), held)
				}
			}
			got := make([]byte, len(queued[0]))
			if wake := way.in.Take(got); wake != waits {
				t.Fatalf("a writer waits: %t, Take says %t", waits, wake)
			}
			waits = false
			if !bytes.Equal(got, queued[0]) {
				t.Fatal("other bytes came out than went in")
			}
			queued, held = queued[1:], held-len(got)
		}
	}
}

// TestNonsense makes the other side claim to have read bytes that were never written. The ring then has no room.
func TestNonsense(t *testing.T) {
	maker, opener := pair(t)
	maker.Out.Reserve(100)
	opener.In.taken.Store(101)
	if maker.Out.Room(1) {
		t.Error("there is room in a ring of which more was read than written")
	}
}

// TestRefused opens files that the other process could truncate, and one of another size.
func TestRefused(t *testing.T) {
	file := func(seals, size int) *os.File {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Ftruncate(fd, int64(size)); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fd), "test")
	}
	plain, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	for want, f := range map[string]*os.File{
		"its size can change":  file(unix.F_SEAL_GROW|unix.F_SEAL_SEAL, areaBytes),
		"memory of 4096 bytes": file(fixed, 4096),
		"seals":                plain,
	} {
		if _, err := Open(f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		f.Close()
	}
}

// TestFixed checks that neither side can change the size of a memory.
func TestFixed(t *testing.T) {
	a, f, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer f.Close()
	if err := f.Truncate(0); err == nil {
		t.Error("the memory was cut off")
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
		t.Error("the memory was closed to writers")
	}
}
