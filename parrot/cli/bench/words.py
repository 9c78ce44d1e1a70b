"""Words that most vocabularies have as one token each, with the space before them."""

_WORDS = """
about after again all also always and another any area around ask away back because become
before begin being best better between big book both bring business but call came can car change
child children city close come company could country course day did different do does door down
each early end even every face fact family far feel few find first follow food for form found
four friend from full game gave get girl give go good government great group grow had half hand
hard has have head hear help here high him hold home hour house how human idea important in into
it job just keep kind know land large last late law lead learn leave left less let letter life
light like line list little live local long look lost made main make man many may mean meet
member men mind minute money month more morning most mother move much music must name near need
never new next night no not now number of off office often old on once one only open or order
other our out over own page paper part party past pay people place plan play point power problem
public put question read real reason right river road room run said same saw say school sea see
seem service set she short should show side since small so some sound state still stop story
street such sun sure system table take talk team tell than that the them then there these they
thing think third this those thought three through time to today together told too took top town
tree true turn two under until up us use very voice walk want war was watch water way we week
well went were what when where which while white who whole why will with without woman word work
world would write year yes yet young your
"""
COMMON_WORDS = [" " + word for word in _WORDS.split()]
