package progress

import (
	"fmt"
	"io"
	"os"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/cprun/cprun/internal/base/terminal"
)

// The bar itself is as wide as there is room for, in steps, so that it is seldom made anew; besideBar
// is what its frame and percentage take.
const (
	barWidth  = 20
	barStep   = 5
	besideBar = 10
)

// A line is a text, and a bar where there is room for one, that is drawn again in place on a terminal.
type line struct {
	w     io.Writer
	bar   *progressbar.ProgressBar // nil before it is drawn
	all   int64                    // of bar
	wide  int                      // its width
	drawn bool                     // the line stands on the terminal
}

// draw shows the text, and how many of all are done; all 0: no bar.
func (l *line) draw(text string, done, all int64) {
	width := l.width()
	if len(text) >= width { // a line that wraps cannot be drawn again in place
		text = terminal.Clip(text, max(width-1, 0))
	}
	l.drawn = true
	wide := min(barWidth, (width-len(text)-besideBar)/barStep*barStep)
	if all <= 0 || wide < barStep {
		fmt.Fprintf(l.w, "\r\x1b[2K%s", text)
		return
	}
	if l.bar == nil || l.all != all || l.wide != wide {
		l.all, l.wide = all, wide
		l.bar = progressbar.NewOptions64(all,
			progressbar.OptionSetWriter(l.w),
			progressbar.OptionUseANSICodes(true),
			progressbar.OptionSetWidth(wide),
			progressbar.OptionSetPredictTime(false), // the text has a better one
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionSetRenderBlankState(false),
		)
	}
	l.bar.Describe(text)
	l.bar.Set64(min(done, all))
}

// clear takes the line away.
func (l *line) clear() {
	if l.drawn {
		fmt.Fprint(l.w, "\r\x1b[2K")
		l.drawn = false
	}
}

// width is that of the terminal, 80 where it cannot be asked.
func (l *line) width() int {
	if f, ok := l.w.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return 80
}
