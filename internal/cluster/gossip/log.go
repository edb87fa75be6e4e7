package gossip

import (
	"bytes"

	"github.com/cprun/cprun/internal/admission"
	"github.com/cprun/cprun/internal/terminal"
)

const maxLine = 500 // bytes of a line that is logged

// logger takes what memberlist logs, a line a call: "[WARN] memberlist: Refuting ...". What it calls
// debugging is left out; names and addresses in a line may be a stranger's.
type logger struct{ to *admission.Log }

func (l logger) Write(line []byte) (int, error) {
	text := bytes.TrimSpace(line)
	level, rest, ok := bytes.Cut(text, []byte(" "))
	if !ok || bytes.Equal(level, []byte("[DEBUG]")) {
		return len(line), nil
	}
	rest = bytes.TrimPrefix(rest, []byte("memberlist: "))
	if len(rest) > maxLine {
		rest = rest[:maxLine]
	}
	l.to.Printf("%s", terminal.Line(rest))
	return len(line), nil
}
