package report

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/lab/experiment"
)

const (
	maxKeys    = 300 // of a config; cprun writes about 100
	maxSetting = 200 // bytes of a key or a value
)

// A settings is a config, one value for each key such as "optimizer.lr".
type settings map[string]string

// settings returns the plan's config; nil without a plan.
func (p *Plan) settings() settings {
	if p == nil {
		return nil
	}
	s := settings{}
	for _, section := range slices.Sorted(maps.Keys(p.Config)) {
		s.add(section, p.Config[section])
	}
	return s
}

// add adds the keys of a section, or of a section inside it.
func (s settings) add(path string, section map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(section)) {
		key, v := path+"."+name, section[name]
		if inner, ok := v.(map[string]any); ok {
			s.add(key, inner)
			continue
		}
		if len(s) == maxKeys || len(key) > maxSetting {
			continue
		}
		text := experiment.Text(v)
		switch {
		case v == nil:
			text = "null"
		case text == "":
			text = `""`
		case len(text) > maxSetting:
			text = strings.ToValidUTF8(text[:maxSetting], "") + "…"
		}
		s[key] = text
	}
}

// String returns a line for each key, in order.
func (s settings) String() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(s)) {
		b.WriteString(key + ": " + s[key] + "\n")
	}
	return b.String()
}

// A config is one run's config on the page.
type config struct{ Name, Text string }

// configs adds the configs of the runs, and a table of the keys that differ between them.
func (p *page) configs(runs []Run) {
	t := &table{Caption: "Config keys that differ", Columns: []string{"key"}}
	var all []settings
	keys := map[string]bool{}
	for _, r := range runs {
		s := r.Plan.settings()
		if s == nil { // a note says that its plan is missing
			continue
		}
		p.Configs = append(p.Configs, config{r.Name, s.String()})
		t.Columns, all = append(t.Columns, r.Name), append(all, s)
		for key := range s {
			keys[key] = true
		}
	}
	if len(all) < 2 {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		row := []cell{{Text: key, Head: true}}
		for _, s := range all {
			row = append(row, text(cmp.Or(s[key], "–")))
		}
		if slices.ContainsFunc(row[2:], func(c cell) bool { return c.Text != row[1].Text }) {
			t.Rows = append(t.Rows, row)
		}
	}
	if len(t.Rows) == 0 {
		p.Facts = append(p.Facts, [2]string{"Config", "the same in all runs"})
		return
	}
	p.Summary = append(p.Summary, t)
}
