//go:build !portable

package wire

import (
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/blame"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/shm"
)

// TestShareOfOthers sends other descriptors with the ready frame than those of a memory and two pipes, such as one of a
// file that could be truncated.
func TestShareOfOthers(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, c := range map[string]struct {
		pick func(memory *os.File, pipes []*os.File) []*os.File
		text string
	}{
		"memory alone": {func(m *os.File, _ []*os.File) []*os.File { return []*os.File{m} }, "1 descriptors, not 3"},
		"no pipes":     {func(m *os.File, _ []*os.File) []*os.File { return []*os.File{m, m, m} }, "pipe"},
		"no memory":    {func(_ *os.File, p []*os.File) []*os.File { return []*os.File{p[0], p[0], p[1]} }, "seals of the memory"},
		"a file":       {func(_ *os.File, p []*os.File) []*os.File { return []*os.File{file, p[0], p[1]} }, "seals of the memory"},
	} {
		var log strings.Builder
		id := pairOf(&log)[1]
		a, b := socketPair(t)
		area, memory, err := shm.New()
		if err != nil {
			t.Fatal(err)
		}
		own, theirs, err := makePipes(a)
		if err != nil {
			t.Fatal(err)
		}
		rights, err := rightsTo(c.pick(memory, theirs))
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := a.WriteMsgUnix(frame(header{kind: frameReady}, ""), rights, nil); err != nil {
			t.Fatal(err)
		}
		ch := &channel{Conn: b, rank: 1, in: newPlainReader(b), out: &plainWriter{conn: b}}
		if err := id.awaitReady(ch); err != nil || ch.area != nil || ch.placing || ch.pipes != nil {
			t.Errorf("%s: taken, or the rank refused: %v", name, err)
		}
		if !strings.Contains(log.String(), c.text) {
			t.Errorf("%s: the log says %q", name, &log)
		}
		closeAll(append(theirs, memory)...)
		own.Close()
		b.Close()
		area.Close()
	}
}

// TestShare sends messages of many sizes both ways through shared memory, several at once and more than it
// holds, and leaves no memory behind.
func TestShare(t *testing.T) {
	var log strings.Builder
	dialed, accepted := shared(t, pairOf(&log))
	if dialed.area == nil || accepted.area == nil || !accepted.placing ||
		!strings.Contains(log.String(), "rank 0: shares memory with rank 1") {
		t.Fatalf("no memory is shared: %s", &log)
	}
	ends := [2]*sockets{talk(accepted), talk(dialed)}
	random := rand.NewChaCha8([32]byte{3})
	var wg sync.WaitGroup
	for rank, s := range ends {
		var out [][]byte
		for _, n := range []int{maxEager + 1, 0, maxPlaced - 1, maxPlaced, 9, maxPlaced + 1, 3 << 20, 40_000, 2<<20 + 5} {
			b := make([]byte, n)
			random.Read(b)
			out = append(out, b)
		}
		wg.Go(func() {
			if !deliver(s, ends[1-rank], out...) {
				t.Errorf("a message from rank %d came out differently", rank)
			}
		})
	}
	wg.Wait()
	closeBoth(ends)
	for i := 0; mappings(t) > 0; i++ {
		if i > 1000 {
			t.Fatal("memory is left behind")
		}
		time.Sleep(time.Millisecond)
	}
}

// TestHostilePlaced announces invalid pieces in shared memory.
func TestHostilePlaced(t *testing.T) {
	for name, c := range map[string]struct {
		h    header
		text string
	}{
		"not accepted": {header{kind: framePlaced, id: link.MsgID{Seq: 5}}, "not accepted"},
		"ahead":        {header{kind: framePlaced, size: maxPlaced}, "a piece at 131072 of a message of 1048576 bytes, of which 0 have come"},
		"a small one":  {header{kind: framePlaced, id: link.MsgID{Seq: 1}}, "a piece at 0 of a message of 4 bytes"},
		"shares twice": {header{kind: frameShare}, "shares memory"},
	} {
		var log strings.Builder
		dialed, accepted := shared(t, pairOf(&log))
		s := talk(accepted)
		xs, r := post(s, false, make([]byte, 1<<20), make([]byte, 4))
		for _, h := range []header{{kind: frameShare}, c.h} {
			dialed.out.add(h, nil)
			dialed.out.(*plainWriter).placed = nil // nothing is written into the ring
			if err := dialed.out.flush(); err != nil {
				t.Fatal(err)
			}
		}
		<-r.Done()
		var pe *blame.PeerError
		if err := xs[0].Err(); !errors.As(err, &pe) || pe.Rank != 1 || !errors.Is(err, blame.ErrProtocol) ||
			!strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want rank 1 and %q", name, err, c.text)
		}
		dialed.Close()
		dialed.area.Close()
		dialed.area.Close()
		s.Close()
	}
}
