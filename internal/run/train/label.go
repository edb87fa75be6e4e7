package train

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// labels say what is queued, for traces and for those who ask what a rank waits for: "step
// 7/forward/layer 3".
type labels struct {
	flat    *model.FlatLayout
	streams []tensor.Stream // of the device; those of transfers follow them
	ring    *ring.Ring      // adds the hops; nil until it is there
	whole   string          // the step, or the validation
}

// begin sets the name of everything that follows, until end.
func (l *labels) begin(format string, args ...any) {
	l.whole = fmt.Sprintf(format, args...)
	l.set("")
}

// end clears it.
func (l *labels) end() {
	l.whole = ""
	l.set("")
}

// part sets the pass that follows, "" for none, and its bucket of the weights; -1 is none.
func (l *labels) part(pass string, bucket int) {
	if bucket == l.flat.Vectors() { // which are used all along
		return
	}
	switch {
	case bucket < 0:
	case bucket == model.Embedding && pass == "backward" && l.flat.Buckets[l.flat.Head()].Size() == 0:
		pass += "/head" // they are tied, and begin together
	case bucket == model.Embedding:
		pass += "/embedding"
	case bucket == l.flat.Head():
		pass += "/head"
	default:
		pass += fmt.Sprintf("/layer %d", bucket-model.Layer(0))
	}
	l.set(pass)
}

func (l *labels) set(part string) {
	path := strings.Trim(l.whole+"/"+part, "/")
	for _, s := range l.streams {
		s.Label(path)
	}
	if l.ring != nil {
		l.ring.Label = path
	}
}
