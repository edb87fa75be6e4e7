package progress

import (
	"bytes"
	"strings"
	"testing"
)

func TestTally(t *testing.T) {
	for _, c := range []struct {
		opts        Options
		want, never string
	}{
		{Options{}, "one ends\n", "cell 1"},
		{Options{Quiet: true}, "", "o"},
		{Options{Terminal: true}, "cell 1  50%", "\x1b[31m"},
		{Options{Terminal: true}, "\r\x1b[2Kone ends\n", "cell 11"},
	} {
		var b bytes.Buffer
		tally := NewTally(&b, c.opts)
		tally.Show(1, 2, "\x1b[31mcell 1")
		tally.Note("one ends")
		tally.Show(1, 2, strings.Repeat("a long line ", 20)) // is cut where the terminal ends
		tally.Close()
		if got := b.String(); !strings.Contains(got, c.want) || strings.Contains(got, c.never) || c.opts.Terminal && !strings.HasSuffix(got, "\r\x1b[2K") {
			t.Errorf("%+v: %q", c.opts, got)
		}
		for line := range strings.SplitSeq(strings.ReplaceAll(b.String(), "\r", "\n"), "\n") {
			if len(line) > 100 {
				t.Errorf("%+v: a line of %d bytes", c.opts, len(line))
			}
		}
	}
}
