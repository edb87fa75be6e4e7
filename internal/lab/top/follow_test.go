package top

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/metrics"
)

// A followed is a follower of a run, with the steps that it read.
func followed(t *testing.T, r run) (f *follower, steps *[]int64) {
	t.Helper()
	s := r.source()
	steps = new([]int64)
	return &follower{root: s.root, add: func(m metrics.Step) { *steps = append(*steps, m.Step) },
		forget: func() { *steps = nil }}, steps
}

// A line written in pieces is read once, when it is complete. Invalid lines are ignored. A replaced, truncated or
// removed file starts over.
func TestFollower(t *testing.T) {
	r := newRun(t)
	f, steps := followed(t, r)
	check := func(want ...int64) {
		t.Helper()
		if err := f.poll(); err != nil || fmt.Sprint(*steps) != fmt.Sprint(want) {
			t.Errorf("%v, %v; want %v", *steps, err, want)
		}
	}
	name := filepath.Join(r.dir, "metrics.jsonl")
	check()
	two := line(2)
	r.add("metrics.jsonl", line(1)+two[:40])
	check(1)
	check(1)
	r.add("metrics.jsonl", two[40:]+"not json\n{\"step\":\n[1]\n{\"step\":-4}\n"+strings.Repeat("{",
		3*maxLine)+"\n"+line(3))
	check(1, 2, 3)
	r.add("metrics.jsonl", strings.Repeat("x", maxLine+7)) // the next write ends this line
	check(1, 2, 3)
	r.add("metrics.jsonl", "\n"+line(4))
	check(1, 2, 3, 4)
	other := filepath.Join(r.dir, "other")
	must.Do(t, os.WriteFile(other, []byte(line(1)+line(2)), 0o600))
	if err := os.Rename(other, name); err != nil { // a resume, from step 2
		t.Fatal(err)
	}
	check(1, 2)
	must.Do(t, os.Truncate(name, int64(len(line(1)))))
	check(1)
	must.Do(t, os.Remove(name))
	check()
	must.Do(t, os.Mkdir(name, 0o700))
	if err := f.poll(); err == nil {
		t.Error("no error of a directory")
	}
}

// Only the end of a long file is read.
func TestFollowerBeginsNearTheEnd(t *testing.T) {
	r := newRun(t)
	f, steps := followed(t, r)
	r.write("metrics.jsonl", line(1))
	if err := os.Truncate(filepath.Join(r.dir, "metrics.jsonl"), maxBehind); err != nil { // a sparse file
		t.Fatal(err)
	}
	r.add("metrics.jsonl", "\n"+line(8)+line(9))
	for range 2 {
		if err := f.poll(); err != nil || fmt.Sprint(*steps) != "[8 9]" {
			t.Errorf("%v, %v", *steps, err)
		}
	}
}

// A series keeps the mean of all values, in bounded memory.
func TestSeriesKeepsMeans(t *testing.T) {
	for _, n := range []int{0, 1, 7, maxPoints - 1, maxPoints, maxPoints + 1, 5*maxPoints + 3, 100 * maxPoints} {
		var s series
		for i := range n {
			s.add(float64(i))
		}
		if len(s.points) >= maxPoints {
			t.Errorf("%d values: %d points", n, len(s.points))
		}
		for _, w := range []int{1, 10, 100, maxPoints} {
			got := s.fit(w)
			if len(got) > w || n > 0 && len(got) < min(w, n, maxPoints/2) {
				t.Errorf("%d values in %d columns: %d points", n, w, len(got))
			}
			for i := 1; i < len(got); i++ {
				if !(got[i] > got[i-1]) {
					t.Errorf("%d values in %d columns: %v after %v", n, w, got[i], got[i-1])
				}
			}
		}
	}
}

func TestChart(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		points []float64
		rows   int
		plain  bool
		want   []string
	}{
		{[]float64{0, 1, 2, 3, 4, 5, 6, 7}, 1, false, []string{"▁▂▃▄▅▆▇█"}},
		{[]float64{5, 5, 5}, 1, false, []string{"▁▁▁"}},
		{[]float64{0, nan, inf, 7}, 1, false, []string{"▁  █"}},
		{[]float64{0, 7}, 1, true, []string{".#"}},
		{[]float64{0, 7.5, 15}, 2, false, []string{" ▁█", "▁██"}},
		{nil, 2, false, []string{"", ""}},
	} {
		low, high, _ := bounds(c.points)
		if got := chart(c.points, c.rows, low, high, c.plain); strings.Join(got, "/") != strings.Join(c.want, "/") {
			t.Errorf("%v: %q, want %q", c.points, got, c.want)
		}
	}
}

// FuzzFollow checks that any metrics.jsonl, in any pieces, is read or ignored, and that its picture fits.
func FuzzFollow(f *testing.F) {
	f.Add([]byte(line(1)+line(2)), 40)
	f.Add([]byte(`{"step":1e300,"loss":"x"}`+"\n"+`{"step":5,"loss":null,"val_loss":1e999,"memory_bytes":-1}`+"\n"), 3)
	f.Add([]byte(`{"step":9223372036854775807,"loss":-1e308,"tokens":-5,"tokens_per_second":1e308,`+
		`"epoch":-1,"time":"0001-01-01T00:00:00Z"}`+"\n"+line(3)), 1)
	f.Fuzz(func(t *testing.T, text []byte, cut int) {
		var whole, parts Source
		whole.log = follower{add: whole.add, forget: whole.forget}
		parts.log = follower{add: parts.add, forget: parts.forget}
		cut = min(max(cut, 0), len(text))
		lines{&whole.log}.Write(text)
		lines{&parts.log}.Write(text[:cut])
		lines{&parts.log}.Write(text[cut:])
		seen := func(s *Source) (all string) {
			v := &s.view
			v.State, v.Now, v.At, v.Steps = Running, noon, v.Last.Step, 100
			s.estimate()
			for _, l := range Layout(v, 80, 40, Look{Zone: time.UTC}) {
				if all += l.String() + "\n"; l.width() > 80 {
					t.Errorf("%q", l)
				}
			}
			return all
		}
		if a, b := seen(&whole), seen(&parts); a != b {
			t.Errorf("%q in two pieces, cut at %d:\n%s, whole\n%s", text, cut, b, a)
		}
	})
}
