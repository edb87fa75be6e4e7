package top

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/model/metrics"
)

// Look configures the display of a View.
type Look struct {
	Plain  bool           // ASCII only
	Zone   *time.Location // time zone; nil: this host's
	Scroll int            // number of ranks scrolled off the top
	Keys   bool           // show the keys
}

const (
	minWidth  = 20              // columns
	minEvents = 4               // events shown before more ranks
	lowRoom   = 14              // fewer lines than this show fewer events
	tall      = 30              // pictures of this height have charts of several lines
	heldUp    = 2 * time.Second // shorter waits are normal
	endless   = 1 << 20         // height without a limit
)

var states = map[State]item{
	NotStarted:  {text: "not started", style: Warn},
	Starting:    {text: "starting", style: Good},
	Running:     {text: "running", style: Good},
	Between:     {text: "waits for the next start", style: Warn},
	Silent:      {text: "silent", style: Warn},
	Dead:        {text: "dead", style: Bad},
	Done:        {text: "done", style: Good},
	Stopped:     {text: "stopped", style: Warn},
	Interrupted: {text: "interrupted", style: Bad},
	Failed:      {text: "failed", style: Bad},
	Unknown:     {text: "state unknown", style: Warn},
}

// Layout formats v in w columns and at most h lines; h of 0 means no limit. It drops lines that do not fit, events and
// ranks first.
func Layout(v *View, w, h int, look Look) []Line {
	w = max(w, minWidth)
	if h <= 0 {
		h = endless
	}
	p := picture{View: v, look: look, w: w, h: h}
	out, foot := p.head(), p.foot()
	room := h - len(foot)
	out = append(out, split(p.ranks(), p.events(), room-len(out))...)
	out = out[:max(0, min(len(out), room))]
	for look.Keys && len(out) < room {
		out = append(out, nil)
	}
	out = append(out, foot...)
	for i := range out {
		out[i] = out[i].clip(w)
	}
	return out[:min(len(out), h)]
}

// split divides the room: a few lines for events, then all ranks, then the other events.
func split(ranks *list, told *list, room int) []Line {
	least := minEvents
	if room < lowRoom {
		least = 2
	}
	forEvents := min(told.height(), least+len(told.heading))
	forRanks := min(ranks.height(), max(0, room-forEvents))
	forEvents = min(told.height(), max(0, room-forRanks))
	return append(ranks.lines(forRanks), told.lines(forEvents)...)
}

type list struct {
	heading []Line // an empty line, a title, a row of names
	rows    []Line
	below   []Line                  // after the rows, if there is room
	first   int                     // first row to show
	last    bool                    // prefer the last rows
	more    func(from, to int) Line // the title if some rows are hidden
}

func (l *list) height() int {
	if l == nil || len(l.rows) == 0 {
		return 0
	}
	return len(l.heading) + len(l.rows) + len(l.below)
}

func (l *list) lines(n int) []Line {
	if l.height() == 0 || n <= len(l.heading) {
		return nil
	}
	below := l.below[:min(len(l.below), max(0, n-len(l.heading)-1))]
	room := n - len(l.heading) - len(below)
	from := min(max(l.first, 0), max(0, len(l.rows)-room))
	if l.last {
		from = max(0, len(l.rows)-room)
	}
	to := min(len(l.rows), from+room)
	out := append([]Line{}, l.heading...)
	if l.more != nil && to-from < len(l.rows) {
		out[1] = l.more(from, to)
	}
	return append(append(out, l.rows[from:to]...), below...)
}

type picture struct {
	*View
	look Look
	w, h int
}

func (p *picture) head() []Line {
	out := []Line{p.title()}
	say := func(text string, style Style) {
		if text != "" {
			out = append(out, Line{{text, style}})
		}
	}
	if p.State == Unknown {
		say(p.Why, Dim)
	} else {
		say(p.Why, Bad)
	}
	if p.State == Dead {
		say("to resume from its newest checkpoint, start it again with the same --run-dir", Dim)
	}
	for _, f := range p.Faults {
		say("cannot read: "+f, Warn)
	}
	if p.State == NotStarted {
		say("this directory has no run yet", Dim)
		return out
	}
	out = append(out, p.progress()...)
	if p.Logged || p.Validated {
		out = append(out, p.losses()...)
		out = append(out, p.speed()...)
		out = append(out, p.memory()...)
	}
	return append(out, p.nodes()...)
}

func (p *picture) title() Line {
	s := states[p.State]
	text := s.text
	switch p.State {
	case Silent:
		text = "silent for " + readable.Duration(p.Heard)
	case Dead:
		text = "dead: no launcher for " + readable.Duration(p.Heard)
	}
	clock := "  " + p.clock(p.Now)
	room := p.w - width(text) - len(clock) - 2
	if room < 8 {
		clock, room = "", room+len(clock)
	}
	line := Line{{clip(p.Name, max(room, 1)), Bold}, {"  ", Plain}, {text, s.style}}
	return append(line, Span{fill(clock, p.w-line.width(), true), Dim})
}

func (p *picture) clock(t time.Time) string {
	return t.In(cmp.Or(p.look.Zone, time.Local)).Format("15:04:05")
}

func (p *picture) progress() []Line {
	at := readable.Count(p.At)
	if p.Steps > 0 {
		at += " of " + readable.Count(p.Steps)
	}
	var all items
	all.add(true, "", at, Bold)
	all.add(p.Timed, "left", readable.Duration(p.Left), Bold)
	all.add(!p.Begun.IsZero() && p.State.lives(), "since the start", readable.Duration(p.Now.Sub(p.Begun)), Plain)
	all.add(p.Logged, "tokens", readable.Short(float64(p.Last.Tokens)), Plain)
	all.add(p.Logged && p.Last.Epoch > 0, "epoch", figure(p.Last.Epoch, "%.2f"), Plain)
	all.add(p.Saved > 0, "checkpoint", readable.Count(p.Saved), Plain)
	all.add(p.Starts > 0, "restarts", fmt.Sprint(p.Starts), Warn)
	out := all.flow("step", p.w)
	if p.About != "" && p.h >= tall {
		out = append(out, Line{{fill("", nameWidth, false), Plain}, {p.About, Dim}})
	}
	if p.Steps > 0 {
		out = append(out, p.bar())
	}
	return out
}

func (p *picture) bar() Line {
	part := min(1, float64(max(0, p.At))/float64(p.Steps))
	percent := fmt.Sprintf(" %3.0f %%", math.Floor(100*part))
	full, empty := "█", "░"
	if p.look.Plain {
		full, empty = "#", "."
	}
	n := max(1, p.w-nameWidth-len(percent))
	done := int(part * float64(n))
	return Line{
		{strings.Repeat(" ", nameWidth), Plain},
		{strings.Repeat(full, done), Accent}, {strings.Repeat(empty, n-done), Dim}, {percent, Plain},
	}
}

func (p *picture) losses() []Line {
	var all items
	loss := "not a number"
	if p.Last.Loss.Known() {
		loss = figure(p.Last.Loss, "%.4f")
	}
	all.add(p.Logged, "", loss, Bold)
	all.add(p.Validated, "validation", fmt.Sprintf("%.4f at step %s", p.Val, readable.Count(p.ValStep)), Bold)
	all.add(p.Logged, "gradient norm", figure(p.Last.GradNorm, "%.3g"), Plain)
	all.add(p.Logged, "lr", figure(p.Last.LR, "%.1e"), Plain)
	out := all.flow("loss", p.w)
	points := p.loss.fit(p.w - nameWidth)
	low, high, ok := bounds(points)
	if !ok || len(points) < 2 {
		return out
	}
	labels := []string{fmt.Sprintf("%.3g", high)}
	if p.h >= tall {
		labels = append(labels, "", fmt.Sprintf("%.3g", low))
	}
	points = logs(points)
	low, high, _ = bounds(points)
	return append(out, p.plot(points, low, high, labels...)...)
}

// plot draws points in a line for each label.
func (p *picture) plot(points []float64, low, high float64, labels ...string) (out []Line) {
	for i, line := range chart(points, len(labels), low, high, p.look.Plain) {
		out = append(out, Line{{fill(labels[i], nameWidth-1, true) + " ", Dim}, {line, Accent}})
	}
	return out
}

func (p *picture) speed() []Line {
	if !p.Logged {
		return nil
	}
	m := &p.Last
	var all items
	add := func(label string, x metrics.Float, format string) {
		all.add(x.Known(), label, fmt.Sprintf(format, float64(x)), Plain)
	}
	all.add(true, "", readable.Rate(float64(m.TokensPerSecond)), Bold)
	add("a device", m.TokensPerSecondPerDevice, "%.0f")
	add("", m.TFLOPsPerDevice, "%.4g TFLOP/s")
	add("MFU", 100*m.MFU, "%.1f %%")
	add("step", m.StepSeconds, "%.3g s")
	if m.StepSeconds > 0 {
		add("waits", 100*(m.CommWaitSeconds/m.StepSeconds), "%.0f %%")
	}
	out := all.flow("speed", p.w)
	points := p.rate.fit(p.w - nameWidth)
	if _, high, ok := bounds(points); ok && len(points) > 1 {
		out = append(out, p.plot(points, 0, high, readable.Short(high))...)
	}
	return out
}

func (p *picture) memory() []Line {
	var most, sum int64
	for _, r := range p.Rows {
		most, sum = max(most, r.Resident), sum+r.Resident
	}
	var all items
	all.add(p.Logged && p.Last.MemoryBytes > 0, "device, peak", readable.Bytes(p.Last.MemoryBytes), Bold)
	all.add(most > 0, "host, largest rank", readable.Bytes(most), Plain)
	all.add(most > 0, "all", readable.Bytes(sum), Plain)
	return all.flow("memory", p.w)
}

func (p *picture) foot() []Line {
	if !p.look.Keys {
		return nil
	}
	text := "q quit   up, down, page up, page down: ranks   Ctrl-L redraw"
	if width(text) > p.w {
		text = "q quit   up/down ranks"
	}
	return []Line{{{text, Dim}}}
}

// figure formats a number, or returns a dash if it is unknown.
func figure(x metrics.Float, format string) string {
	if !x.Known() {
		return "-"
	}
	return fmt.Sprintf(format, float64(x))
}
