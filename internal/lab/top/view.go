// Package top implements `cprun top`, which shows a run live on a terminal, or once as plain lines. It reads only the
// run directory, so it works from any host that shares it, and for finished and crashed runs.
//
//	Source   reads metrics.jsonl (follower), logs/status-*.json (package status) and logs/launcher*.log
//	View     holds the data of one reading
//	Layout   formats a View as lines for a width and a height
//	Live     draws the lines with tcell, until a key or a signal
package top

import (
	"math"
	"time"

	"github.com/cprun/cprun/internal/lab/status"
	"github.com/cprun/cprun/internal/model/metrics"
)

// State is the state of a run, judged by its directory.
type State int

// The states of a run.
const (
	NotStarted  State = iota // the directory has no run
	Starting                 // the launcher runs, but no worker has begun
	Running                  // training
	Between                  // the launcher runs, before the next start of the workers
	Silent                   // the launcher has not written its status for too long
	Dead                     // the launcher is gone without a final status
	Done                     // all steps are done
	Stopped                  // ended on request, after a checkpoint
	Interrupted              // interrupted twice
	Failed                   // a rank failed
	Unknown                  // there are metrics, but no status
)

// lives reports whether the launcher is running.
func (s State) lives() bool { return s == Starting || s == Running || s == Between }

// View describes a run at one moment.
type View struct {
	Name  string    // name of the run directory
	Now   time.Time // time of the reading
	State State
	Why   string        // reason for the state
	Heard time.Duration // time since the last status
	About string        // summary of the config

	Begun time.Time // start of the launcher; zero: unknown
	At    int64     // the last step of any rank
	Steps int64     // steps of the config; 0: unknown
	Left  time.Duration
	Timed bool // Left is known

	Last       metrics.Step // the last logged step
	Logged     bool         // Last is set
	Val        float64      // the newest validation loss
	ValStep    int64
	Validated  bool
	loss, rate series // logged loss in nats, and tokens per second

	Saved  int64 // step of the newest checkpoint; 0: none
	Nodes  []status.Node
	Rows   []status.Row // of all nodes, by rank
	Starts int          // restarts of the workers
	Events []Event
	Faults []string // read errors
}

// maxPoints bounds the points of a series, above the columns of a terminal.
const maxPoints = 512

// A series is a curve in bounded memory. When it is full, each pair of points becomes their mean.
type series struct {
	points []float64
	per    int // values per point
	sum    float64
	in     int // values in sum
}

// add appends a value. Values that are not finite make gaps.
func (s *series) add(x float64) {
	s.per = max(s.per, 1)
	s.sum += x // a gap makes its point a gap
	if s.in++; s.in < s.per {
		return
	}
	s.points = append(s.points, s.sum/float64(s.in))
	s.sum, s.in = 0, 0
	if len(s.points) < maxPoints {
		return
	}
	for i := range maxPoints / 2 {
		s.points[i] = (s.points[2*i] + s.points[2*i+1]) / 2
	}
	s.points, s.per = s.points[:maxPoints/2], 2*s.per
}

// fit returns the curve in at most n points, including an incomplete last point.
func (s *series) fit(n int) []float64 {
	points := s.points
	if s.in > 0 {
		points = append(points[:len(points):len(points)], s.sum/float64(s.in))
	}
	if len(points) <= n || n < 1 {
		return points
	}
	out := make([]float64, n)
	for i := range n {
		a, b := i*len(points)/n, (i+1)*len(points)/n
		sum := 0.0
		for _, x := range points[a:b] {
			sum += x
		}
		out[i] = sum / float64(b-a)
	}
	return out
}

var (
	// blocks and plains are the characters of a chart, from empty to full, in Unicode and in ASCII.
	blocks = []rune(" ▁▂▃▄▅▆▇█")
	plains = []rune(" ..--==##")
)

// chart draws points as columns, rows lines high, top line first. Values from low to high fill it; low is visible. Gaps
// are empty.
func chart(points []float64, rows int, low, high float64, plain bool) []string {
	cells := blocks
	if plain {
		cells = plains
	}
	lines := make([][]rune, rows)
	for _, x := range points {
		level := 0
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			level = 1
			if high > low {
				level = 1 + int(math.Round((x-low)/(high-low)*float64(8*rows-1)))
			}
			level = min(max(level, 1), 8*rows)
		}
		for i := range rows {
			lines[i] = append(lines[i], cells[min(max(level-8*(rows-1-i), 0), 8)])
		}
	}
	out := make([]string, rows)
	for i, line := range lines {
		out[i] = string(line)
	}
	return out
}

func bounds(points []float64) (low, high float64, ok bool) {
	low, high = math.Inf(1), math.Inf(-1)
	for _, x := range points {
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			low, high, ok = min(low, x), max(high, x), true
		}
	}
	return low, high, ok
}

// logs returns the logarithms of points if all finite ones are positive. A loss falls fast at first; on a linear scale
// the rest would be flat.
func logs(points []float64) []float64 {
	if low, _, ok := bounds(points); !ok || low <= 0 {
		return points
	}
	out := make([]float64, len(points))
	for i, x := range points {
		out[i] = math.Log(x)
	}
	return out
}
