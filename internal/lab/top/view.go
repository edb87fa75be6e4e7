// Package top shows a run while it goes on: on a terminal as a picture that is drawn again where it has changed, and
// elsewhere as lines. It reads the run directory and nothing else, so that it works on another host of a shared file
// system, of a run that has ended, and of one whose launcher is dead.
//
//	source   reads: metrics.jsonl (follower), logs/status-0000.json (package status), logs/launcher.log
//	View     is what was read
//	Layout   makes lines of a View, for a width and a height
//	Live     draws them (tcell writes the cells that have changed), until a key or a signal
package top

import (
	"math"
	"time"

	"github.com/cprun/cprun/internal/launch/status"
	"github.com/cprun/cprun/internal/model/metrics"
)

// State is how a run stands, as far as its directory tells.
type State int

// The states of a run.
const (
	NotStarted  State = iota // nothing of a run is there
	Starting                 // its launcher lives, and no worker is at work yet
	Running                  // it trains
	Between                  // its launcher lives, and the next start of the workers is to come
	Silent                   // its launcher has not written for too long
	Dead                     // its launcher is gone, without a word
	Done                     // all steps are done
	Stopped                  // it has ended on request, after a checkpoint
	Interrupted              // it was interrupted twice
	Failed                   // a rank has failed
	Unknown                  // there are metrics, and no word of the launcher
)

// lives reports whether the launcher's words are current.
func (s State) lives() bool { return s == Starting || s == Running || s == Between }

// View describes a run at one moment.
type View struct {
	Name  string    // the run directory, as it is shown
	Now   time.Time // when it was read
	State State
	Why   string // it has failed, or nothing is known
	Heard time.Duration
	About string // the config, in a few words

	Begun time.Time // by the launcher; zero: not known
	At    int64     // the last step that some rank has done
	Steps int64     // of the config; 0: not known
	Left  time.Duration
	Timed bool // Left is known

	Last       metrics.Step // the newest that was logged
	Logged     bool         // there is one
	Val        float64      // the newest validation loss
	ValStep    int64
	Validated  bool
	loss, rate series // of the logged steps: loss in nats, tokens a second

	Saved  int64 // the step of the newest checkpoint; 0: there is none
	Nodes  []status.Node
	Rows   []status.Row // of all nodes, by rank
	Starts int          // of all workers, before the present one
	Events []Event
	Faults []string // of reading
}

// maxPoints bounds the points of a series: more than the columns of a terminal.
const maxPoints = 512

// A series is a curve of any length in bounded memory: when it is full, each two points become their mean.
type series struct {
	points []float64
	per    int // values of one point
	sum    float64
	in     int // values in sum
}

// add appends a value. One that is not finite is a gap.
func (s *series) add(x float64) {
	s.per = max(s.per, 1)
	s.sum += x // a gap makes its point one
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

// fit returns the curve in at most n points, with the values that are no whole point yet.
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

// The characters of a chart, from nothing to a full cell: of Unicode, and where a terminal has none.
var (
	blocks = []rune(" ▁▂▃▄▅▆▇█")
	plains = []rune(" ..--==##")
)

// chart draws points as columns, rows lines high, from the top. Values from low to high fill it; the lowest still
// shows. Gaps are empty.
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

// logs returns the logarithms of points, if all that are finite are above zero: a loss falls fast at first, and what
// comes later would be flat.
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
