package apierror_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
)

func TestPageSaysEverythingOnce(t *testing.T) {
	for _, k := range apierror.Kinds() {
		e := apierror.New(k.Reason, "the thing is in a state; try again")
		e.SandboxID, e.RequestID = "abc", "req-1"
		page := string(e.Page())
		require.Contains(t, page, "- Berth</title>", k.Reason)
		require.Contains(t, page, "sandbox abc", k.Reason)
		require.Contains(t, page, "request req-1", k.Reason)
		require.Contains(t, page, "("+string(k.Reason)+")", k.Reason)
		require.Contains(t, page, "<p>The thing is in a state", "a message begins with a capital letter")
		again := strings.Contains(page, "again by itself")
		require.Equal(t, k.RetryAfter > 0, again, k.Reason)
		require.Equal(t, again, !strings.Contains(page, "; try again"), "a page that reloads asks for nothing")
		require.Less(t, len(page), 4<<10)
	}
	require.Equal(t, 1, strings.Count(strings.ToLower(string(apierror.New(apierror.SandboxNotFound, "there is no such sandbox").Page())),
		"there is no such sandbox</"), "once as the title, once as the headline, and not as the message")
}

func TestPageTakesNothingAsMarkup(t *testing.T) {
	const evil = `"><script>alert(1)</script><a href='javascript:x'>`
	e := apierror.New(apierror.PortPrivate, "%s", evil)
	e.SandboxID, e.RequestID, e.Links = evil, evil, []string{"javascript:alert(1)", `//x"onclick="y`}
	for _, page := range []string{string(e.Page()), string(apierror.Home(evil))} {
		for _, markup := range []string{"<script", `href="javascript`, "href='javascript", `"onclick`} {
			require.NotContains(t, page, markup)
		}
	}
}

func TestHomeNamesTheDomainAndNoVersion(t *testing.T) {
	page := string(apierror.Home("sandbox.example.com"))
	require.Contains(t, page, "&lt;port&gt;-&lt;sandbox ID&gt;.sandbox.example.com")
	require.Contains(t, page, "api.sandbox.example.com")
	require.Contains(t, page, "Berth runs sandboxes for AI agents.")
	require.Contains(t, page, "<a href=\"https://")
	require.NotContains(t, page, "refresh")
}
