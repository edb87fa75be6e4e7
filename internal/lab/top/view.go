package top

import (
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
