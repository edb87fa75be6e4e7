package checkpoint

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// The first decision with a number counts, on all launchers. A later one replaces it.
func TestClaim(t *testing.T) {
	dir := rooted(t.TempDir())
	claim := func(job string, n int64, decision string) string {
		t.Helper()
		var raw []byte
		if decision != "" {
			raw = []byte(decision)
		}
		got, err := Claim(t.Context(), dir, Start{Job: job, First: 5, Generation: n}, raw)
		if err != nil {
			return err.Error()
		}
		return string(got)
	}
	for i, c := range []struct {
		n              int64
		decision, want string
	}{
		{5, "", ""}, {6, `{"a":1}`, `{"a":1}`}, {6, `{"b":1}`, `{"a":1}`}, {7, `{"b":2}`, `{"b":2}`},
		{6, `{"a":1}`, `{"b":2}`}, {7, "", `{"b":2}`}, {5, `{"c":1}`, `{"b":2}`},
	} {
		if got := claim("mine", c.n, c.decision); got != c.want {
			t.Errorf("%d: decision %d is %s, want %s", i, c.n, got, c.want)
		}
	}
	if got, want := records(t, dir), []string{generationName(6), generationName(7)}; !slices.Equal(got, want) {
		t.Errorf("the directory has %q, want %q", got, want)
	}
	if got := claim("other", 8, ""); !strings.Contains(got, ErrSuperseded.Error()) {
		t.Errorf("a decision of another job: %s", got)
	}
	if _, err := NewSaver(world(1)[0], Options{Dir: dir, RunID: "r",
		Start: Start{Job: "mine", First: 5, Generation: 6, Claimed: true}}); !errors.Is(err, ErrSuperseded) {
		t.Errorf("workers of an older decision: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir.Name(), ".generation-00000007.tmp-1"), nil, 0o600); err != nil {
		t.Fatal(err) // of a launcher that was killed before it published
	}
	s, err := NewSaver(world(1)[0], Options{Dir: dir, RunID: "r",
		Start: Start{Job: "mine", First: 5, Generation: 7, Claimed: true}})
	if err != nil {
		t.Fatalf("workers of the newest decision: %v", err)
	}
	must.Do(t, s.Close())
	if got := records(t, dir); !slices.Equal(got, []string{generationName(7)}) {
		t.Errorf("the directory has %q", got)
	}
	if st, err := dir.Stat(generationName(7)); err != nil || st.Mode() != 0o600 {
		t.Errorf("the record: %v, %v", st, err)
	}
}

// records lists the records of a directory.
func records(t *testing.T, dir *os.Root) []string {
	t.Helper()
	return must.Have(fs.Glob(dir.FS(), ".generation-*"))
}

var claimTrials = flag.Int("claim.trials", 300, "trials of TestClaimsOnANetworkFileSystem")

// Launchers on several hosts claim decisions at the same time, on a network file system with caches, faults and lost
// replies. Each decision has one value, and of all workers only those of the newest decision write checkpoints.
func TestClaimsOnANetworkFileSystem(t *testing.T) {
	for seed := range uint64(*claimTrials) {
		if err := claims(t, seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// claims runs one trial: each launcher claims the number after the newest decision that it knows.
func claims(t *testing.T, seed uint64) error {
	const launchers, decisions = 3, 4
	r, s := rand.New(rand.NewPCG(seed, 3)), newServer()
	var mu sync.Mutex
	decided := map[string]string{} // by number
	var faults []error
	var wg sync.WaitGroup
	for i := range launchers {
		h := s.host(seed*launchers + uint64(i))
		h.rate = []int{0, 100, 30, 10}[r.IntN(4)]
		if r.IntN(4) == 0 {
			h.dies = 1 + r.IntN(60)
		}
		wg.Go(func() {
			for known := int64(0); known < decisions; {
				start := Start{Job: "j", First: 1, Generation: known + 2}
				value := fmt.Sprintf(`"%d by %d"`, known+1, i)
				f := newFence(h.folder(), start)
				newest, err := f.decide(t.Context(), []byte(value))
				if h.dead {
					return
				}
				if err != nil || newest == nil {
					continue // again, as a launcher does
				}
				n, _, _ := strings.Cut(strings.Trim(string(newest), `"`), " ")
				number, err := strconv.ParseInt(n, 10, 64)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				if old, ok := decided[n]; ok && old != string(newest) || number <= known {
					faults = append(faults, fmt.Errorf("after decision %d: decision %s is %s, and was %s", known, n,
						newest, old))
				}
				decided[n] = string(newest)
				mu.Unlock()
				known = max(known+1, number)
			}
		})
	}
	wg.Wait()
	return errors.Join(faults...)
}
