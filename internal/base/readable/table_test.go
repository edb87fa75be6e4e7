package readable

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

func TestTableAligns(t *testing.T) {
	table := Table{Title: "transfers", Head: []string{"call", "µs", "GB/s"}, Notes: []string{"a note"}}
	table.Add("exchange", "12.5", "3")
	table.Add("all_reduce", "7", "")
	var b strings.Builder
	must.Have(table.WriteTo(&b))
	want := "transfers\n" +
		"call          µs  GB/s\n" +
		"----------  ----  ----\n" +
		"exchange    12.5     3\n" +
		"all_reduce     7\n" +
		"a note\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
