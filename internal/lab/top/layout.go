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
	head := p.head()
	foot := p.foot()
	room := h - len(head) - len(foot)
	ranks := p.ranks()
	told := p.events()
	lists := split(ranks, told, room)
	out := append(head, lists...)
	if len(out) > h-len(foot) {
		out = out[:max(0, h-len(foot))]
	}
	if look.Keys {
		for len(out) < h-len(foot) {
			out = append(out, nil)
		}
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
	below   []Line // after the rows, if there is room
	first   int    // first row to show
	last    bool   // prefer the last rows
	more    func(from, to, of int) Line
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
	if l.more != nil && to-from < len(l.rows) && len(out) > 1 {
		out[1] = l.more(from, to, len(l.rows))
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
	if p.Why != "" {
		style := Bad
		if p.State == Unknown {
			style = Dim
		}
		out = append(out, Line{{clip(p.Why, p.w), style}})
	}
	if p.State == Dead {
		out = append(out, Line{{clip("to resume from its newest checkpoint, start it again with the same --run-dir",
			p.w), Dim}})
	}
	for _, f := range p.Faults {
		out = append(out, Line{{clip("cannot read: "+f, p.w), Warn}})
	}
	if p.State == NotStarted {
		return append(out, Line{{clip("this directory has no run yet", p.w), Dim}})
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
		text = fmt.Sprintf("dead: no launcher for %s", readable.Duration(p.Heard))
	}
	clock := p.clock(p.Now)
	room := p.w - width(text) - len(clock) - 4
	if room < 8 {
		clock, room = "", p.w-width(text)-2
	}
	left := Line{{clip(p.Name, max(room, 1)), Bold}, {"  ", Plain}, {text, s.style}}
	if clock == "" {
		return left.clip(p.w)
	}
	return ends(left, Line{{clock, Dim}}, p.w)
}

func (p *picture) clock(t time.Time) string {
	return t.In(cmp.Or(p.look.Zone, time.Local)).Format("15:04:05")
}

func (p *picture) progress() []Line {
	items := []item{{text: readable.Count(p.At), style: Bold}}
	if p.Steps > 0 {
		items[0].text += " of " + readable.Count(p.Steps)
	}
	if p.Timed {
		items = append(items, item{"left", readable.Duration(p.Left), Bold})
	}
	if !p.Begun.IsZero() && p.State.lives() {
		items = append(items, item{"since the start", readable.Duration(p.Now.Sub(p.Begun)), Plain})
	}
	if p.Logged {
		items = append(items, item{"tokens", readable.Short(float64(p.Last.Tokens)), Plain})
		if p.Last.Epoch.Known() && p.Last.Epoch > 0 {
			items = append(items, item{"epoch", fmt.Sprintf("%.2f", float64(p.Last.Epoch)), Plain})
		}
	}
	if p.Saved > 0 {
		items = append(items, item{"checkpoint", readable.Count(p.Saved), Plain})
	}
	if p.Starts > 0 {
		items = append(items, item{"restarts", fmt.Sprint(p.Starts), Warn})
	}
	out := flow("step", items, p.w)
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
	var items []item
	if p.Logged {
		loss := "not a number"
		if p.Last.Loss.Known() {
			loss = figure(p.Last.Loss, "%.4f")
		}
		items = append(items, item{text: loss, style: Bold})
	}
	if p.Validated {
		items = append(items, item{"validation", fmt.Sprintf("%.4f at step %s", p.Val, readable.Count(p.ValStep)),
			Bold})
	}
	if p.Logged {
		items = append(items, item{"gradient norm", figure(p.Last.GradNorm, "%.3g"), Plain},
			item{"lr", figure(p.Last.LR, "%.1e"), Plain})
	}
	out := flow("loss", items, p.w)
	points := p.loss.fit(p.w - nameWidth)
	low, high, ok := bounds(points)
	if !ok || len(points) < 2 {
		return out
	}
	scaled := logs(points)
	a, b, _ := bounds(scaled)
	rows := 1
	if p.h >= tall {
		rows = 3
	}
	for i, line := range chart(scaled, rows, a, b, p.look.Plain) {
		label := ""
		switch {
		case i == 0:
			label = fmt.Sprintf("%.3g", high)
		case i == rows-1:
			label = fmt.Sprintf("%.3g", low)
		}
		out = append(out, Line{{fill(label, nameWidth-1, true) + " ", Dim}, {line, Accent}})
	}
	return out
}

func (p *picture) speed() []Line {
	if !p.Logged {
		return nil
	}
	m := &p.Last
	items := []item{{text: readable.Rate(float64(m.TokensPerSecond)), style: Bold}}
	add := func(label string, x metrics.Float, format string) {
		if x.Known() {
			items = append(items, item{label, fmt.Sprintf(format, float64(x)), Plain})
		}
	}
	add("a device", m.TokensPerSecondPerDevice, "%.0f")
	if m.TFLOPsPerDevice.Known() {
		items = append(items, item{"", figure(m.TFLOPsPerDevice, "%.3g") + " TFLOP/s", Plain})
	}
	add("MFU", 100*m.MFU, "%.1f %%")
	add("step", m.StepSeconds, "%.3g s")
	if m.CommWaitSeconds.Known() && m.StepSeconds > 0 {
		items = append(items, item{"waits", fmt.Sprintf("%.0f %%", 100*float64(m.CommWaitSeconds/m.StepSeconds)),
			Plain})
	}
	out := flow("speed", items, p.w)
	points := p.rate.fit(p.w - nameWidth)
	if _, high, ok := bounds(points); ok && len(points) > 1 {
		line := chart(points, 1, 0, high, p.look.Plain)[0]
		out = append(out, Line{{fill(readable.Short(high), nameWidth-1, true) + " ", Dim}, {line, Accent}})
	}
	return out
}

func (p *picture) memory() []Line {
	var items []item
	if p.Logged && p.Last.MemoryBytes > 0 {
		items = append(items, item{"device, peak", readable.Bytes(p.Last.MemoryBytes), Bold})
	}
	var most, sum int64
	for _, r := range p.Rows {
		most, sum = max(most, r.Resident), sum+r.Resident
	}
	if most > 0 {
		items = append(items, item{"host, largest rank", readable.Bytes(most), Plain},
			item{"all", readable.Bytes(sum), Plain})
	}
	if len(items) == 0 {
		return nil
	}
	return flow("memory", items, p.w)
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
