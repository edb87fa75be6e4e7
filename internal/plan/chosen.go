package plan

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/internal/planner"
	"github.com/cprun/cprun/internal/readable"
)

// runnersUp is how many ways the text shows besides the chosen one; --json has all.
const runnersUp = 3

// Apart returns Kinds, of nothing none.
func (c *Chosen) Apart() map[int]planner.Way {
	if c == nil {
		return nil
	}
	return c.Kinds
}

// write tells what was chosen, the runners-up, and the slowest.
func (c *Chosen) write(b *strings.Builder) {
	fmt.Fprintf(b, "\nchoice      by the costs of this machine: attention takes %s of a step\n", readable.Seconds(c.Seconds))
	for i, l := range c.Layers {
		first := l.Ranked[0]
		fmt.Fprintf(b, "            %s: %s, %s a layer\n", l.name(), first.Way, readable.Seconds(first.Seconds))
		switch {
		case l.Own:
			b.WriteString("              these run by it, and others as the config says\n")
		case len(l.Refused) > 0:
			l.writeRefused(b)
		case l.Apart:
			b.WriteString("              they run as the other layers do, which is faster in all\n")
		}
		for j, t := range l.Ranked[1:] {
			if last := j == len(l.Ranked)-2; j < runnersUp || last {
				fmt.Fprintf(b, "              %-44s %10s  %+.1f%%\n", t.Way, readable.Seconds(t.Seconds), 100*(t.Seconds/first.Seconds-1))
			} else if j == runnersUp {
				fmt.Fprintf(b, "              %d more\n", len(l.Ranked)-runnersUp-2)
			}
		}
		if i == len(c.Layers)-1 && len(c.Models) > 1 {
			var list []string
			for _, m := range c.Models {
				list = append(list, fmt.Sprintf("%s with %s %s", m.Layout, m.Backend, readable.Seconds(m.Seconds)))
			}
			fmt.Fprintf(b, "            layouts, all layers: %s\n", strings.Join(list, "; "))
		}
	}
	if len(c.Groups) > 1 {
		var list []string
		for _, g := range c.Groups {
			text := fmt.Sprintf("%d x %d ranks %s", g.Data, g.Context, readable.Seconds(g.Seconds))
			if g.TooLarge {
				text += " (memory has no room)"
			}
			list = append(list, text)
		}
		fmt.Fprintf(b, "            data x context, attention of a step: %s\n", strings.Join(list, "; "))
	}
}

// writeRefused tells why the layers do not run by what is fastest for them.
func (l *LayerWays) writeRefused(b *strings.Builder) {
	fmt.Fprintf(b, "              they run as the other layers do, since by it %s would not be their backend:\n", l.Refused[0].Backend)
	for i, r := range l.Refused {
		if first, hops := together(l.Refused, i, func(x *Rejected) (string, string) { return x.Rule, x.Hop }); first {
			fmt.Fprintf(b, "                %s\n", strings.TrimPrefix(r.Rule+hops+": "+r.Reason, ": "))
		}
	}
}

func (l *LayerWays) name() string {
	if l.Window < 0 {
		return fmt.Sprintf("%d layer%s without a window", l.Layers, plural(l.Layers))
	}
	return fmt.Sprintf("%d layer%s with a window of %d keys", l.Layers, plural(l.Layers), l.Window+1)
}
